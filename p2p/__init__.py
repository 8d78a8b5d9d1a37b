"""The network: a libp2p node, its channels, links and directory. Knows nothing of tensors or the application.

The link protocol, version 1
============================
Up to two byte streams join a pair of peers, each opened on first use and kept: `/shoal/1/live` for calls and message
streams, `/shoal/1/bulk` for calls of bulk priority. Both use the protocol below. Integers are unsigned and big-endian.

Each side first sends the preface: `shoal`, a zero byte, the major version (1) and the minor version (0). A different
major version is refused with an error that names both; different minor versions are compatible. Frames follow, each
a header of 20 bytes, a name, and a chunk of a message's body:

    kind 1 | flags 1 | name_length 2 | id 4 | length 4 | total 4 | arg 4 | name | body chunk

- `flags`: bits 0-1 the priority (0 control, 1 decode, 2 prefill, 3 bulk), bit 2 first chunk, bit 3 last chunk; the
  other bits are zero when sent and ignored when received.
- `name`: at most 128 bytes of printable ASCII, only on the first frame of the kinds that have one.
- `length`: bytes of this chunk, at most 256 KiB; every chunk but the last has 16 KiB or more, and exactly 256 KiB if
  the receiver's minor version is 0. On a slow link small chunks let urgent messages overtake sooner.
- `total`: bytes of the whole body, at most 64 MiB, the same in each chunk. Chunks of messages with different ids or
  priorities may interleave, those of one id and priority may not: higher priorities overtake at every chunk, but for
  a share that they leave to others, and equal ones keep their order. At most 256 messages may be unfinished at a time.
- `id`: of a call or a stream, odd from the side that opened the byte stream, even from the other, never reused.

| kind | name | arg | body | meaning |
|---|---|---|---|---|
| 1 request | method | timeout, ms | yes | run this method; the answer has the same id |
| 2 answer | | | yes | the handler's result, with the request's priority |
| 3 error | code | | text, 1 KiB | no answer: `busy` (refused, nothing was run), `unknown_method`, `internal`, others |
| 4 cancel | | | | the caller gave up: stop the handler, send no answer, drop the part of the body that arrived |
| 5 open | protocol | | | a new message stream |
| 6 opened | | | | the stream is accepted; the opener sends no message before this arrives |
| 7 message | | | yes | one message of a stream, in either direction |
| 8 credit | | bytes | | this many of the sent bytes have been consumed |
| 9 close | | | | the sender sends no more on this stream; follows everything it sent before |
| 10 reset | code | | text, 1 KiB | the stream is broken both ways, or was not accepted (`busy`, `unknown_protocol`) |
| 11 ping, 12 pong | | | | a pong has the ping's id |
| 128 switch | token | | | the last frame on this byte stream: the next one comes on another, see below |

A receiver skips kinds 128 to 255 that it does not know; any other unknown kind, and any breach of these rules, ends the
link. A frame for an unknown call or stream is ignored, since it may have crossed a cancel or a reset on the way. A peer
that sends too many frames that are skipped or ignored loses the link.
Pings, credits, opens and errors have control priority.

A link moves to a better connection, such as the direct one that hole punching made beside a relayed one, with all its
calls and streams: the side that opened the byte stream opens another under the same protocol and `/move`, and sends 16
random bytes there, the token. The other side returns them. Then each side in turn, the opener first, sends `switch`
with the token in hex on the old byte stream and goes on with the next frame on the new one, without a preface. Each
direction remains one sequence of frames, so nothing is lost, doubled or reordered. Nodes that do not know
`/move` keep the old byte stream.

Flow control: a message counts as its body and 256 bytes. A side may send a message on a stream if it fits into 4 MiB
together with the bytes that were sent and not credited, or if those are below 2 MiB (so that a message larger than the
window can pass). A reader sends credit whenever it has consumed 2 MiB. Calls have no window: a peer's calls are bounded
by the other side's quotas (`p2p.link.quota`); a call over a quota is answered `busy` at its first chunk, and the caller
need not send the rest. Answers that the peer has not read count too. A side that does not accept one chunk within a
minute loses the link.
"""
