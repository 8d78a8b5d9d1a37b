"""The identity of a swarm, without any network: records, names, invites, coverage.

Also the swarms saved in the home folder (`saved`). Everything here is pure or reads and writes one file.
`app.membership` sends and receives these values; `app.joining` turns a user's wish into a saved swarm; `app.hosting`
chooses blocks from the coverage.
"""
