"""Day 31: right answers to `bytes_in_flight` and `newest_row`, in several styles."""

from bisect import bisect_right


def by_early_returns(tile, num_stages, head_dim, itemsize, programs, shared):
    if num_stages == 1:
        return 0
    a_tile = 2 * tile * head_dim * itemsize
    of_a_program = a_tile * ((num_stages - 1) // 2)
    fit = shared // of_a_program
    if fit == 0:
        raise ValueError(f"{of_a_program} bytes of shared memory do not fit into {shared}")
    return of_a_program * min(fit, programs)


def by_counting(tile, num_stages, head_dim, itemsize, programs, shared):
    """Programs start one by one, as long as there is shared memory for another."""
    key = head_dim * itemsize
    tiles = max(0, num_stages - 1) >> 1
    need = sum(tile * (key + key) for _ in range(tiles))
    if need > shared:
        raise ValueError("too little shared memory: " + str(shared))
    free, flying = shared, 0
    for _ in range(programs):
        if free >= need:
            free -= need
            flying += need
    return flying


def by_remainder(tile, num_stages, head_dim, itemsize, programs, shared):
    """All shared memory but the rest that is too small for one more program."""
    stages = num_stages - 1
    need = (stages - stages % 2) * tile * head_dim * itemsize
    if not need:
        return 0
    if shared < need:
        raise ValueError(f"shared memory: {shared} bytes, needed: {need}")
    return min(shared - shared % need, programs * need)


def by_sorting(rows, capability):
    found = None
    for row, launch in sorted(rows):
        if row <= capability:
            found = launch
    if found is None:
        raise ValueError(f"all rows are newer than {capability}")
    return found


def by_number(rows, capability):
    """A capability as one whole number, 75 for 7.5; minor versions have one digit."""

    def number(pair):
        major, minor = pair
        return 10 * major + minor

    table = {number(row): launch for row, launch in rows}
    usable = [row for row in table if row <= number(capability)]
    if len(usable) == 0:
        raise ValueError("the GPU has capability {}.{}, older than all rows".format(*capability))
    return table[max(usable)]


def by_bisection(rows, capability):
    ordered = sorted(rows, key=lambda row: row[0])
    place = bisect_right([row for row, _ in ordered], capability)
    if place == 0:
        raise ValueError(f"no launch for {capability}")
    return ordered[place - 1][1]


RIGHT = {
    "bytes_in_flight": (by_early_returns, by_counting, by_remainder),
    "newest_row": (by_sorting, by_number, by_bisection),
}
