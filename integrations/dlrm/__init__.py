"""The recommender application: click data, models, one trainer, one report, and two commands."""
