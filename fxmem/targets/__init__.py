"""The kinds of targets, one file each, and the inputs that fit them."""
