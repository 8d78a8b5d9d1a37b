// A js-libp2p peer for the interoperation test: echoes every stream, and dials and checks echoes when told to.
// Prints its address, then answers one JSON line on stdin with one JSON line on stdout.
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

// Node 20 lacks this one; js-libp2p needs no other new thing.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new this((onResolve, onReject) => { resolve = onResolve; reject = onReject })
  return { promise, resolve, reject }
}

const ECHO = '/interop/echo'

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()]
})

async function send (stream, data) {
  if (!stream.send(data)) await stream.onDrain()
}

await node.handle(ECHO, async (stream) => {
  try {
    for await (const chunk of stream) await send(stream, chunk)
    await stream.close()
  } catch (error) {
    stream.abort(error)
  }
})

async function echo (connection, size) {
  const stream = await connection.newStream(ECHO)
  const sent = Buffer.alloc(size)
  for (let i = 0; i < size; i++) sent[i] = i % 251
  const writing = (async () => {
    for (let at = 0; at < size; at += 65536) await send(stream, sent.subarray(at, Math.min(at + 65536, size)))
    await stream.close()
  })()
  let at = 0
  for await (const chunk of stream) {
    const bytes = chunk.subarray()
    if (sent.compare(bytes, 0, bytes.length, at, at + bytes.length) !== 0) throw new Error(`byte ${at} differs`)
    at += bytes.length
  }
  await writing
  if (at !== size) throw new Error(`${at} of ${size} bytes came back`)
}

console.log(JSON.stringify({ address: node.getMultiaddrs()[0].toString() }))

for await (const line of createInterface({ input: process.stdin })) {
  const { dial, sizes } = JSON.parse(line)
  try {
    const connection = await node.dial(multiaddr(dial))
    await Promise.all(sizes.map(async (size) => echo(connection, size)))
    await connection.close()
    console.log(JSON.stringify({ ok: true }))
  } catch (error) {
    console.log(JSON.stringify({ ok: false, error: String(error) }))
  }
}
