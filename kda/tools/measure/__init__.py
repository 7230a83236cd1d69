"""Times of calls beside a check of what they gave: shapes of models, clocks of both kinds of device, results."""
