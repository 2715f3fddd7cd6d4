"""What requests cost: a row for each, the equation with the time of the instances, prices and bills."""
