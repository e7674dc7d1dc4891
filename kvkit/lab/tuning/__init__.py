"""Studies of the tuner: strategies replayed over recorded trials, and the regret of guesses."""
