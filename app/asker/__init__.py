"""The side that asks: prompts in, tokens out, over the hops of a route.

`reply_service` takes requests and has tokenizer, embedding and head; `reply` is one reply; `route_session` feeds the
hops and replaces those that die, as `recovery` plans; `head_batcher` chooses the next tokens of all replies together;
`audit` computes some tokens again elsewhere, and `evidence` concludes who lied. Routes come from `app.routing`, the
frames are those of `app.session`, and HTTP is left to `app.api`.
"""
