"""What a node looks like from outside: the views that the API, the command line and the dashboard share."""
