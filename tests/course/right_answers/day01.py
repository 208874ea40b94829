"""Day 1: right answers in other styles than the package's."""


def position_by_position(config, length):
    q, kv = config.n_q * config.head_dim, config.n_kv * config.head_dim
    hidden, mlp = config.hidden_size, config.intermediate_size
    matrices = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
    matrices += [(hidden, mlp), (hidden, mlp), (mlp, hidden)]
    total = 0
    for _ in range(config.num_layers):
        for position in range(length):
            for rows, columns in matrices:
                total += 2 * rows * columns
            for _ in range(config.n_q):
                total += 4 * config.head_dim * (position + 1)
    return total + 2 * hidden * config.vocab_size


def term_by_term(config, length):
    h, d, layers = config.hidden_size, config.head_dim, config.num_layers
    q_and_o = 2 * 2 * h * config.n_q * d
    k_and_v = 2 * 2 * h * config.n_kv * d
    mlp = 2 * 3 * h * config.intermediate_size
    scores = 4 * d * config.n_q * sum(range(1, length + 1))
    head = 2 * h * config.vocab_size
    return layers * (length * (q_and_o + k_and_v + mlp) + scores) + head


def by_recursion(config, length):
    """The work after n tokens is that after n - 1 and the newest position's."""
    if length == 0:
        return 2 * config.hidden_size * config.vocab_size
    heads = 2 * config.n_q + 2 * config.n_kv
    weights = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    newest = 2 * weights + 4 * length * config.n_q * config.head_dim
    return by_recursion(config, length - 1) + config.num_layers * newest


RIGHT = {"work_of_a_token": (position_by_position, term_by_term, by_recursion)}
