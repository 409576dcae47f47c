"""The agent of a further host: starts and ends ranks there as the supervisor on the first host says."""
