"""The table that tells the convolution where a token's window begins, which is made once and read by every kernel.

A fragment is a run of tokens of one document that stands together in x. places int32 [T] holds PLACES * fragment +
min(position in it, W-1) for each token, or NOWHERE for a token of no document, whose last bits are no position.
"""

PLACES = 8  # numbers of a fragment, more than any position
PLACE_BITS = 3
NOWHERE = -1
