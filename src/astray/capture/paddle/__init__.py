"""Records Paddle programs: the second framework. `adapter` puts the other modules in place."""
