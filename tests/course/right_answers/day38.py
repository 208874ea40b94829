"""Right answers to the exercises of Day 38, in different styles."""

import hashlib

# chained_hash ------------------------------------------------------------------------------------


def token_by_token(before, tokens):
    """Folds one token at a time into the hash."""
    for token in tokens:
        before = hash((before, token))
    return before


def nested(before, tokens):
    """The tokens as a tuple of their own."""
    return hash((before, tuple(tokens)))


def digest(before, tokens):
    """A cryptographic hash of the text of the numbers, as vLLM may use."""
    text = ",".join(map(str, [before, *tokens]))
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


# shareable_blocks --------------------------------------------------------------------------------


def full_blocks_of_the_rest(num_tokens, block_size):
    """divmod of all tokens but the last."""
    blocks, _ = divmod(num_tokens - 1, block_size)
    return blocks


def one_less_if_whole(num_tokens, block_size):
    """All full blocks, but not the one that holds the last token."""
    full = num_tokens // block_size
    return full - 1 if num_tokens % block_size == 0 else full


def all_but_the_last_block(num_tokens, block_size):
    """The blocks of the prompt, rounded up, without the one of the last token."""
    return -(-num_tokens // block_size) - 1


RIGHT = {
    "chained_hash": (token_by_token, nested, digest),
    "shareable_blocks": (full_blocks_of_the_rest, one_less_if_whole, all_but_the_last_block),
}
