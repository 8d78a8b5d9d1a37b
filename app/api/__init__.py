"""The control API: HTTP and server-sent events on loopback, for all programs.

This package knows HTTP: routes, tokens, request limits, error bodies, and the client that the other two use. It sees a
node only through the interface `app.api.control.Control`, which `app.node` implements; the shape of a snapshot and its
JSON belong to `app.snapshot`, the replies to `app.asker`.

    GET  /, /health, /healthz   200 while the process answers; the only routes without a token
    GET  /metrics               for Prometheus (`app.api.metrics`)
    /v1/…                       OpenAI's endpoint (`app.api.openai`, `app.api.responses`) and Anthropic's `/v1/messages`
    /api/…                      Ollama's (`app.api.ollama`)
    POST /tokenize, /detokenize as vLLM has them (`app.api.tokens`)

What follows controls the node and is ours alone, under `/control`:

    GET  /snapshot      the node's whole visible state (`app.snapshot.views.Snapshot`)
    GET  /events        server-sent events: `snapshot` at once and after each change, `note` for each logged event
    GET  /status, /peers, /blocks, /sessions, /swarms, /prospects, /id, /doctor
    GET  /logs          recent log records; ?after=NUMBER skips those already seen
    GET  /config        every setting; PUT /config/NAME {"value": text or null} changes one
    POST /create        {"name", "model", "private"}
    POST /join          {"target": a name, name#hash or invite, "force": move even if no member answers}
    POST /leave         {"name"}
    POST /invite        {"name": null for the active swarm, "expires_in_s", "uses", "approve", "delegate"}
    GET  /invites       limited invites made here; POST /invites/approve and /refuse {"peer"}, /cancel {"id"}
    POST /revoke        {"peer", "remove"}: remove a member from a private swarm; GET /revoked lists them
    POST /chat          {"messages", …}: lines of JSON: the pieces of the reply, then `done` or `error`
    POST /pause         {"for_s": seconds, or null until `resume`}: move sessions to other members, host nothing
    POST /drain         wait for sessions to finish, without a time limit, then host nothing until `resume`
    POST /resume        end a pause or drain that the user asked for; courtesy rules may still keep the node paused
    POST /stop          drain, then end the process

Every request needs `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`; with the setting `open_loopback`, programs of
this machine get replies without it. A failure is `{"error": {"message", "type", "code", …}}`, as in OpenAI's API, or
has the form of the family that was asked (`app.api.error_forms`); the message is the line that the command line prints.
"""
