"""The control API: HTTP and server-sent events on loopback, for the command line, the dashboard and other programs.

    GET  /healthz           200 while the process answers; the one route without a token
    GET  /metrics           for Prometheus (`app.api.metrics`)
    GET  /v1/models         OpenAI's endpoint, with POST /v1/chat/completions and /v1/completions (`app.api.openai`)
    GET  /api/snapshot      everything at once (`app.snapshot.views.Snapshot`)
    GET  /api/events        server-sent events: `snapshot` at once and after each change, `note` for what happened
    GET  /api/status, /api/peers, /api/blocks, /api/sessions, /api/swarms, /api/id, /api/doctor
    GET  /api/config        every setting; PUT /api/config/NAME {"value": text or null} changes one
    POST /api/create        {"name", "model", "private"}
    POST /api/join          {"target": a name, name#hash or invite}
    POST /api/leave         {"name"}
    POST /api/invite        {"name": null for the active swarm}
    POST /api/chat          {"messages", …}: lines of JSON: the pieces of the reply, then `done` or `error`
    POST /api/pause         {"for_s": seconds, or null until `resume`}: sessions move on, then nothing is hosted
    POST /api/drain         sessions finish, however long they take, then nothing is hosted until `resume`
    POST /api/resume        what a person paused goes on, unless a rule says otherwise
    POST /api/stop          the node drains and ends

Every other request bears `Authorization: Bearer TOKEN`. A failure is `{"error": {"type", "message"}}`, the message
being the line that the command line prints.
"""
