// Directory nodes of js-libp2p's kad-dht for the tests: `node directory.mjs PROTOCOL COUNT [IP]`. They know each other.
// Prints their addresses, then answers one JSON line on stdin, an order to the first of them, with one on stdout.
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'
import * as raw from 'multiformats/codecs/raw'
import * as Digest from 'multiformats/hashes/digest'

// Node 20 lacks this one; js-libp2p needs no other new thing.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new this((onResolve, onReject) => { resolve = onResolve; reject = onReject })
  return { promise, resolve, reject }
}

const [protocol, count, ip = '127.0.0.1'] = process.argv.slice(2)

// js-libp2p tells nobody of a public address that it was not told to announce.
const addresses = (port) => ({ listen: [`/ip4/${ip}/tcp/${port}`], announce: port > 0 ? [`/ip4/${ip}/tcp/${port}`] : [] })

const makeNode = (_, number) => createLibp2p({
  addresses: addresses(ip === '127.0.0.1' ? 0 : 4001 + number),
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionGater: { denyDialMultiaddr: async () => false },
  services: {
    identify: identify(),
    ping: ping(),
    dht: kadDHT({
      protocol,
      clientMode: false,
      peerInfoMapper: passthroughMapper,
      allowQueryWithZeroPeers: true,
      validators: { shoal: async () => {} },
      selectors: { shoal: () => 0 }
    })
  }
})
const nodes = await Promise.all(Array.from({ length: Number(count) }, makeNode))
for (const node of nodes) {
  for (const other of nodes) if (other !== node) await node.dial(other.getMultiaddrs())
}
const [node] = nodes
const dht = node.services.dht

// The key of an order is the multihash of a CID in hex, or the path of a value.
const cidOf = (hex) => CID.createV1(raw.code, Digest.decode(Buffer.from(hex, 'hex')))
const pathOf = (text) => new TextEncoder().encode(text)

async function obey ({ op, key, value, address }) {
  const signal = AbortSignal.timeout(20_000)
  switch (op) {
    case 'dial':
      await node.dial(multiaddr(address), { signal })
      return {}
    case 'known':
      return { peers: [...dht.routingTable.kb.toIterable()].map(({ peerId }) => peerId.toString()) }
    case 'provide': {
      let taken = 0
      for await (const event of dht.provide(cidOf(key), { signal })) {
        if (event.name === 'PEER_RESPONSE' && event.messageName === 'ADD_PROVIDER') taken++
      }
      return { taken }
    }
    case 'find': {
      const peers = new Set()
      for await (const event of dht.findProviders(cidOf(key), { signal })) {
        if (event.name === 'PROVIDER') event.providers.forEach(({ id }) => peers.add(id.toString()))
      }
      return { peers: [...peers] }
    }
    case 'put': {
      let taken = 0
      for await (const event of dht.put(pathOf(key), Buffer.from(value, 'hex'), { signal })) {
        if (event.name === 'PEER_RESPONSE' && event.messageName === 'PUT_VALUE') taken++
      }
      return { taken }
    }
    case 'get':
      for await (const event of dht.get(pathOf(key), { signal })) {
        if (event.name === 'VALUE') return { value: Buffer.from(event.value).toString('hex') }
      }
      return {}
  }
  throw new Error(`unknown op ${op}`)
}

console.log(JSON.stringify({ addresses: nodes.map((each) => each.getMultiaddrs()[0].toString()) }))

for await (const line of createInterface({ input: process.stdin })) {
  try {
    console.log(JSON.stringify({ ok: true, ...await obey(JSON.parse(line)) }))
  } catch (error) {
    console.log(JSON.stringify({ ok: false, error: String(error) }))
  }
}
process.exit(0)
