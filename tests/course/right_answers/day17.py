"""Right answers to the exercises of Day 17, in different styles."""

import torch

# release -----------------------------------------------------------------------------------------


def block_views(self, table):
    """The pool seen as blocks: [layers, blocks, slots of a block, ...]."""
    size = self.allocator.block_size
    for part in (self.k, self.v) if self._poison else ():
        part.unflatten(1, (-1, size))[:, table.blocks] = float("nan")
    table.free()


def slot_by_slot(self, table):
    """A loop over positions, each slot from the table."""
    if self._poison:
        for position in range(table.capacity):
            slot = table.slot(position)
            self.k[:, slot] = torch.nan
            self.v[:, slot] = torch.nan
    table.free()


def layer_by_layer(self, table):
    """Fills each layer's part of each block, then frees the table."""
    size = self.allocator.block_size
    for block in table.blocks if self._poison else []:
        for layer in range(len(self.k)):
            self.k[layer, block * size : block * size + size].fill_(torch.nan)
            self.v[layer, block * size : block * size + size].fill_(torch.nan)
    table.free()


# free --------------------------------------------------------------------------------------------


def released(self):
    """The pool does the work; the cache forgets."""
    self.pool.release(self.table)
    self.seq_len, self._mapped = 0, 0


def only_if_owned(self):
    """Asks the table, not the length, whether there is anything to give back."""
    if self.table.blocks:
        self.pool.release(self.table)
    self._mapped = self.seq_len = 0


def forgets_first(self):
    """The other order."""
    self.seq_len = 0
    self._mapped = 0
    pool = self.pool
    pool.release(self.table)


RIGHT = {
    "release": (block_views, slot_by_slot, layer_by_layer),
    "free": (released, only_if_owned, forgets_first),
}
