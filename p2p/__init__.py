"""The network: a libp2p node, its channels, streams and directory services. Knows no tensors and no application.

The link protocol, version 1
============================
Two byte streams may join a pair of peers, each opened when first needed and kept: `/shoal/1/live` for calls and message
streams, `/shoal/1/bulk` for calls of bulk priority. Both speak what follows. Integers are unsigned and big-endian.

Each side first sends the preface `shoal`, a zero byte, the major version (1) and the minor version (0). Another major
is refused by name; minor versions understand each other. Then frames follow, each a header of 20 bytes, a name, and a
chunk of a message's body:

    kind 1 | flags 1 | name_length 2 | id 4 | length 4 | total 4 | arg 4 | name | body chunk

- `flags`: bits 0-1 the priority (0 control, 1 decode, 2 prefill, 3 bulk), bit 2 first chunk, bit 3 last chunk; the
  other bits are zero when sent and ignored when received.
- `name`: at most 128 bytes of printable ASCII, on the first frame of the kinds that have one, and only there.
- `length`: of this chunk, at most 256 KiB; every chunk but the last is exactly that.
- `total`: of the whole body, at most 64 MiB, the same in each chunk. Chunks of messages with another id or priority
  may interleave, those of one id and priority may not: so higher priorities overtake at every chunk and equal ones keep
  their order. At most 256 messages may be begun and not finished.
- `id`: of a call or a stream, odd from the side that opened the byte stream and even from the other, never used again.

| kind | name | arg | body | meaning |
|---|---|---|---|---|
| 1 request | method | timeout, ms | yes | do this; the answer comes under the same id |
| 2 answer | | | yes | what the handler returned, in the request's priority |
| 3 error | code | | text, 1 KiB | no answer: `busy` (refused, nothing was run), `unknown_method`, `internal`, others |
| 4 cancel | | | | the caller gave up: stop the handler, answer nothing, drop what arrived |
| 5 open | protocol | | | a new message stream |
| 6 opened | | | | the stream is accepted; the opener sends nothing before |
| 7 message | | | yes | one message of a stream, either way |
| 8 credit | | bytes | | so much of what was sent has been consumed |
| 9 close | | | | the sender sends no more on this stream; behind all it sent before |
| 10 reset | code | | text, 1 KiB | the stream is broken both ways, or was not accepted (`busy`, `unknown_protocol`) |
| 11 ping, 12 pong | | | | a pong bears the ping's id |

Kinds 128 to 255 are skipped by whoever does not know them; any other unknown kind, like any breach of these rules, ends
the link. A frame for a call or stream that is not known (any more) is ignored, since it may have crossed a cancel
or a reset. Pings, credits, opens and errors travel as control.

Flow: a message weighs its body and 256 bytes. A side may send on a stream while what it sent and was not credited fits
4 MiB with the new message, or is below 2 MiB (so that a message larger than the window can pass); a reader gives credit
whenever it has consumed 2 MiB. Calls have no window: what a peer has under way is bounded by the other side's quotas
(`p2p.link.quota`), over which it is answered `busy` at its first chunk; it need not send the rest. Answers that wait to
be read count too, and a side that does not take one chunk within a minute loses the link.
"""
