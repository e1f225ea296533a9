"""Two runs held against each other row by row: pairs by id, paired statistics, a verdict."""
