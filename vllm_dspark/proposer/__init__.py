"""The drafter: its checkpoint, its heads and the drafting of a block."""
