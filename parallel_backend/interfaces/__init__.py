"""The two interfaces where families and strategies meet: State, Geometry, Family, Strategy. Neither's code."""
