"""What Podium costs, as ratios to something that runs beside it in the same process and the same minute.

Machines are noisy, so nothing here is a timed test: each figure is a ratio of medians of runs that alternate.
"""
