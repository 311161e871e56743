"""Columns of the segment table, which the table kernel writes and every other kernel reads.

A segment is a run of chunks of one chain (a document, or a fragment of one); chains are cut into segments so that one
long chain keeps a whole device busy. Rows beyond the last segment are ghosts: their chunk count is 0 and no kernel
does anything for them.
"""

START = 0  # first token
END = 1  # one past the last token; equal to START in a ghost
CHUNK = 2  # first chunk, counted over all chains
CHAIN = 3
ENTRY = 4  # row of the state in front among the carried states, -1 for a chain's first segment
EXIT = 5  # row that this segment's map feeds, -1 when nothing follows
LAST = 6  # 1 for a chain's last segment
GRAD_ENTRY = 7  # row of the gradient behind among the carried gradients, -1 for a chain's last segment
GRAD_EXIT = 8  # row that this segment's gradient map feeds, -1 when nothing is in front
COLUMNS = 9

CHUNK_COLUMNS = 3  # of the chunk table: first token, number of tokens (0 in a ghost), chain that begins here or -1

# Of the link tables, one line per carried row: of the states and, with an exchange, of the gradients. A chain's rows
# stand together; the first line has their number, others 0.
LENGTH = 0
LINK_CHAIN = 1  # in all lines of the states, -1 in a ghost; of gradients in the first line
LINK_CORRECTION = 2  # for gradients: row of the correction of the segment behind the chain's first line; others follow
LINK_COLUMNS = 3
