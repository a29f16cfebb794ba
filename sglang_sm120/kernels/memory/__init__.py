"""What stays in L2, and what is there before it is asked for."""
