"""The control API: HTTP and server-sent events on loopback, for command line, dashboard and other programs.

This package knows HTTP: routes, tokens, request limits, error bodies, and the client that the other two use. It sees a
node only through the interface `app.api.control.Control`, which `app.node` implements; the shape of a snapshot and its
JSON belong to `app.snapshot`, the replies to `app.asker`.

    GET  /, /health, /healthz   200 while the process answers; the only routes without a token
    GET  /metrics           for Prometheus (`app.api.metrics`)
    GET  /v1/models         OpenAI's endpoint, with POST /v1/chat/completions and /v1/completions (`app.api.openai`)
    GET  /api/snapshot      the node's whole visible state (`app.snapshot.views.Snapshot`)
    GET  /api/events        server-sent events: `snapshot` at once and after each change, `note` for each logged event
    GET  /api/status, /api/peers, /api/blocks, /api/sessions, /api/swarms, /api/prospects, /api/id, /api/doctor
    GET  /api/logs          recent log records; ?after=NUMBER skips those already seen
    GET  /api/config        every setting; PUT /api/config/NAME {"value": text or null} changes one
    POST /api/create        {"name", "model", "private"}
    POST /api/join          {"target": a name, name#hash or invite, "force": move even if no member answers}
    POST /api/leave         {"name"}
    POST /api/invite        {"name": null for the active swarm, "expires_in_s", "uses", "approve", "delegate"}
    GET  /api/invites       limited invites made here; POST /api/invites/approve and /refuse {"peer"}, /cancel {"id"}
    POST /api/revoke        {"peer", "remove"}: remove a member from a private swarm; GET /api/revoked lists them
    POST /api/chat          {"messages", …}: lines of JSON: the pieces of the reply, then `done` or `error`
    POST /api/pause         {"for_s": seconds, or null until `resume`}: move sessions to other members, host nothing
    POST /api/drain         wait for sessions to finish, without a time limit, then host nothing until `resume`
    POST /api/resume        end a pause or drain that the user asked for; courtesy rules may still keep the node paused
    POST /api/stop          drain, then end the process

Every other request needs `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`. A failure is `{"error": {"message",
"type", "code", …}}`, as in OpenAI's API; the message is the line that the command line prints.
"""
