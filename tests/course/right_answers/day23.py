"""Day 23: right answers to `launch_arguments` and `choose`, in several styles."""

BACKENDS = {"triton", "tlsim", "reference"}


def by_axis(q, k_pool, v_pool, out):
    """Each stride asked for by its axis."""
    grid = (q.size(2), q.size(1))
    strides = (
        q.stride(1),
        q.stride(2),
        k_pool.stride(0),
        k_pool.stride(1),
        v_pool.stride(0),
        v_pool.stride(1),
        out.stride(1),
        out.stride(2),
    )
    return grid, strides


def by_a_loop(q, k_pool, v_pool, out):
    """One loop over the tensors and the axes that the kernel moves along."""
    strides = []
    for tensor, axes in ((q, (1, 2)), (k_pool, (0, 1)), (v_pool, (0, 1)), (out, (1, 2))):
        strides.extend(tensor.stride(axis) for axis in axes)
    _, n_q, query_len, _ = q.shape
    return (query_len, n_q), tuple(strides)


def by_addresses(q, k_pool, v_pool, out):
    """A stride is the distance between two neighbours, here measured from their addresses."""

    def apart(tensor, axis):
        if tensor.shape[axis] < 2:
            return tensor.stride()[axis]
        first, second = tensor.select(axis, 0), tensor.select(axis, 1)
        return (second.data_ptr() - first.data_ptr()) // tensor.element_size()

    axes = [(q, 1), (q, 2), (k_pool, 0), (k_pool, 1), (v_pool, 0), (v_pool, 1), (out, 1), (out, 2)]
    return (*q.shape[2:0:-1],), tuple(apart(*pair) for pair in axes)


def by_early_returns(device_type, has_triton, capability, override=None):
    if override is None:
        if device_type != "cuda":
            return "tlsim"
        if not has_triton:
            return "tlsim"
        return "triton" if capability >= (7, 5) else "tlsim"
    if override == "triton" and (device_type != "cuda" or not has_triton or capability < (7, 5)):
        raise ValueError(f"{override} needs a GPU of capability 7.5 and Triton")
    if override in BACKENDS:
        return override
    raise ValueError(f"unknown backend {override}")


def by_number(device_type, has_triton, capability, override=None):
    """The capability as one whole number, 75 for 7.5."""
    major, minor = capability or (0, 0)
    able = device_type == "cuda" and has_triton and 10 * major + minor >= 75
    runs = {"triton": able, "tlsim": True, "reference": True}
    wanted = override or ("triton" if able else "tlsim")
    if not runs.get(wanted, False):
        raise ValueError(f"the backend {wanted!r} cannot run on this {device_type} device")
    return wanted


def by_a_list(device_type, has_triton, capability, override=None):
    """What can run, the best first; an override must be among it."""
    can_run = ["tlsim", "reference"]
    if (device_type, has_triton) == ("cuda", True) and tuple(capability) >= (7, 5):
        can_run.insert(0, "triton")
    if override is not None and override not in can_run:
        raise ValueError("cannot run " + override + ": one of " + ", ".join(can_run))
    return can_run[0] if override is None else override


RIGHT = {
    "launch_arguments": (by_axis, by_a_loop, by_addresses),
    "choose": (by_early_returns, by_number, by_a_list),
}
