"""What people look at while a server serves: the page, its numbers, metrics, and why a plan is as it is."""
