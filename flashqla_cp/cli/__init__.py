"""Command line of FlashQLA-CP."""
