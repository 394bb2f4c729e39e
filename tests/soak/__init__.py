"""A cache that is used for long, in bad weather: does anything grow, and are the books still right?"""
