"""The limits that SECURITY.md promises are those of the code: every row of its table, by name.

That they hold under attack is tested elsewhere (`tests/p2p/test_hostile_*.py`, the other files of this folder).
"""

from __future__ import annotations

import re
from pathlib import Path

from app.api import bodies, event_log, places, response_store, server
from app.api import guard as api_guard
from app.asker import recovery, reply_service, route_session, text_places
from app.config.settings import Settings
from app.joining import admission, nearby
from app.manifest.manifest import MAX_MANIFEST_BYTES, MAX_TOKENIZER_BYTES
from app.membership import exchange, guard
from app.membership import wire as membership_wire
from app.membership.table import TableLimits
from app.node import active_swarm
from app.rounds import (
    checkpoint,
    decisions,
    greetings,
    grid,
    island,
    job_search,
    job_text,
    machines,
    record,
    statements,
    traces,
    train_jobs,
)
from app.rounds import log as round_log
from app.rounds import wire as round_wire
from app.routing import broken_links, capacity, strangers
from app.routing.cost import BELIEVED_TIMES, ENOUGH_HOMES
from app.routing.estimates import AGAIN_S, BELIEVED_S, FAR_SLOWER
from app.routing.planner import HIDDEN_EVERY, WITHOUT_ADAPTER_S
from app.routing.reroute import SLOW_STEP_S, SLOW_STEPS
from app.serving import batching, block_server, handover, hop_session, orders
from app.serving.adapters import AdapterLimits
from app.serving.admission import IDLE_S, MAX_HELD_BACK, TURN_S, AdmissionLimits
from app.serving.block_server import IDLE_STREAM_S, ServerSettings
from app.serving.hop_session import MAX_RECEIVERS
from app.session import cache_wire, outbound
from app.swarm import certificates, invitations
from app.swarm.invite import MAX_INVITE_CHARS
from app.swarm.records import MAX_ANNOUNCEMENT_BYTES, MAX_RECORD_BYTES
from app.system import logs
from app.training import activations, reading, states, trainer
from app.training import hop as training_hop
from app.training import wire as training_wire
from app.weights import chunk_client, chunk_schedule, chunk_server, download
from app.weights import wire as weights_wire
from engine.text import chat_template, constraint, grammar_trial, tokenizer_growth, tool_calls
from p2p import rate_limit, shares
from p2p.addresses import MAX_ADDRESSES_PER_PEER
from p2p.channel import yamux_flow, yamux_table
from p2p.dht import lookup, public_directory, store
from p2p.dht import streams as kad
from p2p.dht import wire as dht_wire
from p2p.discovery import mdns, mdns_packets, seeker
from p2p.discovery.known_peers import MAX_REMEMBERED, MAX_UNREACHED
from p2p.envelope import MAX_PAYLOAD_BYTES
from p2p.host import dialer, heartbeat, identify, peer_record
from p2p.host.address_book import MAX_PEERS
from p2p.host.admission import ConnectionLimits
from p2p.host.host import ADDRESSES_OF_A_RELAY, LOOKUPS, UNAWAITED_DIALS
from p2p.host.pruning import ENOUGH_LINKS
from p2p.link import link, outbox
from p2p.link.quota import Limits
from p2p.nat import hole_punching, reachability, relay_client, upnp
from p2p.nat.relay_server import RelayLimits
from p2p.values import MAX_BODY_BYTES, WINDOW_BYTES

MIB, KIB = 2**20, 2**10
ADAPTERS, SESSION = AdapterLimits(), route_session.SessionSettings()
DOORS, QUOTA, TABLE, PLACES, RELAY = ConnectionLimits(), Limits(), TableLimits(), AdmissionLimits(), RelayLimits()

# For each row, the numbers that it must name, as they are in the code.
ROWS: dict[str, tuple[float, ...]] = {
    "connections": (DOORS.connections, DOORS.connections_per_ip, DOORS.connections_per_peer),
    "handshakes under way": (
        DOORS.handshakes,
        DOORS.handshakes_per_ip,
        DOORS.handshake_timeout_s,
        DOORS.accepts_per_ip_s,
    ),
    "streams of a connection": (
        yamux_table.MAX_STREAMS,
        DOORS.streams_per_connection,
        DOORS.streams_per_ip_s,
        DOORS.streams_per_ip_burst,
    ),
    "a node's time for what peers send": (
        100 * DOORS.loop_share_per_ip,
        1000 * DOORS.loop_burst_per_ip_s,
        MAX_ADDRESSES_PER_PEER,
    ),
    "unread bytes": (yamux_flow.CONNECTION_WINDOW_BYTES / MIB, yamux_flow.UNREAD_BYTES / MIB),
    "calls under way": (QUOTA.calls_per_peer, QUOTA.calls_floor, QUOTA.calls, QUOTA.requests_per_s),
    "message streams": (QUOTA.streams_per_peer, QUOTA.streams_floor, QUOTA.streams, WINDOW_BYTES / MIB),
    "bodies and answers in memory": (
        QUOTA.bytes_per_peer / MIB,
        QUOTA.bytes_floor / MIB,
        QUOTA.bytes / MIB,
        MAX_BODY_BYTES / MIB,
    ),
    "waiting output of session streams, and as much of training streams": (
        outbound.MAX_WAITING_BYTES / MIB,
        outbound.MAX_WAITING_FRAMES,
        outbound.MAX_WAITING_IN_ALL / 2**30,
        outbound.FRAME_COST_BYTES,
    ),
    "rows before a slow link": (
        route_session.FEED_AHEAD_BYTES / MIB,
        block_server.AHEAD_BYTES / MIB,
        block_server.URGENT_AHEAD_BYTES / KIB,
        outbox.CHUNK_S * 1000,
    ),
    "outputs that a hop keeps": (
        hop_session.KEPT_BYTES / MIB,
        ServerSettings().kept_bytes / 2**30,
        block_server.PART_BYTES / MIB,
    ),
    "waits of a step": (batching.MAX_WAIT_STEPS,),
    "sessions at a hop": (
        PLACES.peer_sessions,
        PLACES.sessions,
        PLACES.own_share * PLACES.sessions,
        TURN_S,
        IDLE_S,
        MAX_HELD_BACK,
        ServerSettings().unused_s,
    ),
    "orders that change a hop's cache": (orders.MAX_ORDERS, orders.ORDERS_S * 1000),
    "hops that refuse an asker's sessions for want of room": (
        capacity.MAX_HOPS,
        capacity.FADE_S,
        1 / capacity.ASK_S,
        capacity.FRESH_S,
        capacity.LONGEST_DOUBT_S,
    ),
    "rows that wait for a hop's device": (
        ServerSettings().queued_bytes / 2**30,
        route_session.UNCOMPUTED_BYTES / MIB,
    ),
    "adapters at a hop": (
        ADAPTERS.asker_bytes / MIB,
        ADAPTERS.total_bytes / MIB,
        ADAPTERS.asker_loading,
        ADAPTERS.loading,
        ADAPTERS.orders,
        ADAPTERS.asker_orders,
        ADAPTERS.idle_s,
        ADAPTERS.turn_s,
        ADAPTERS.fetch_s,
        ADAPTERS.index_s,
        ADAPTERS.late_s,
        ADAPTERS.bytes_per_s * 8 / 10**6,
    ),
    "session frames of one address that have nothing computed": (
        PLACES.frames_burst,
        PLACES.frames_per_s,
        PLACES.again_bytes / KIB,
        PLACES.order_s * 1e6,
    ),
    "dials that askers make a hop try": (
        outbound.MAX_DIALS_PER_ASKER,
        outbound.MAX_DIALS,
        outbound.DIALS_BURST,
        1 / outbound.DIALS_PER_S,
    ),
    "links between two hops that break": (broken_links.REMEMBERED, broken_links.AVOIDED_S, broken_links.SHARED),
    "waits for a hop of a reply": (
        SESSION.stuck_s,
        recovery.OVERDUE_TIMES,
        recovery.STEP_TOKENS,
        recovery.SLOW_LINK_BYTES_PER_S,
        BELIEVED_S,
        SESSION.adapter_s,
        WITHOUT_ADAPTER_S,
    ),
    "replies that take longer than was believed": (
        AGAIN_S,
        BELIEVED_S,
        route_session.MIN_OVERDUE_S,
        route_session._FORGOTTEN_AFTER,
    ),
    "members that never worked for an asker": (
        strangers.TRIAL_S,
        strangers.WARY_S,
        strangers.WARIEST_S,
        strangers.LEFT_ASIDE_S,
        strangers.LONGEST_ASIDE_S,
        strangers.REMEMBERED,
        FAR_SLOWER,
        SLOW_STEPS,
        SLOW_STEP_S,
    ),
    "speeds that members claim": (BELIEVED_TIMES, BELIEVED_S, ENOUGH_HOMES, HIDDEN_EVERY),
    "caches that move": (
        handover.MAX_GIVEN,
        handover.GIVE_S,
        MAX_RECEIVERS,
        handover.REQUEST_S,
        handover.ORDER_S,
        handover.MAX_TAKEN,
        handover.MAX_TAKEN_PER_ASKER,
        cache_wire.HANDOVER_S,
        cache_wire.CHUNK_BYTES / MIB,
        handover.DIALS_BURST,
        1 / handover.DIALS_PER_S,
    ),
    "idle session streams": (),
    "frames that achieve nothing": (
        yamux_table.IDLE_FRAMES,
        yamux_table.IDLE_FRAMES_PER_S,
        link.IDLE_FRAMES,
        link.IDLE_FRAMES_PER_S,
        heartbeat._BURST_FRAMES,
        heartbeat._FRAMES_PER_S,
    ),
    "`identify` and `ping` of other libp2p software": (identify.BURST_REQUESTS, identify.REQUESTS_PER_S),
    "directory": (
        store.MAX_RECORDS,
        store.MAX_PROVIDERS_PER_KEY,
        store.MAX_KEYS_PER_PROVIDER,
        store.PROVIDER_TTL_S / 60,
        store.MAX_VALUE_RECORDS,
        dht_wire.MAX_VALUE_BYTES / KIB,
        dht_wire.MAX_VALUES,
        dht_wire.MAX_REQUEST_BYTES / KIB,
        dht_wire.MAX_ANSWER_BYTES / KIB,
        dht_wire.MAX_PEERS + dht_wire.MAX_PROVIDERS,
        dht_wire.MAX_ADDRESSES,
        kad.BURST_REQUESTS,
        kad.REQUESTS_PER_S,
        lookup.MAX_ASKED,
        lookup.PATHS,
        lookup.MAX_IN_FLIGHT,
    ),
    "public directory": (
        public_directory.LOOK_UPS_BURST,
        1 / public_directory.LOOK_UPS_PER_S / 60,
        public_directory.LOOK_UP_S,
        public_directory.MAX_CONNECTIONS,
        public_directory.KEPT_CONNECTIONS,
        public_directory.BYTES_PER_DAY / MIB,
        public_directory.BYTES_BURST / MIB,
        public_directory.PUBLISHING_BYTES / MIB,
        public_directory.MAX_KEYS,
    ),
    "members known": (
        TABLE.members,
        TABLE.strangers,
        TABLE.of_home,
        TABLE.vain_strangers,
        1 / TABLE.vain_strangers_per_s,
    ),
    "statements of one peer": (
        exchange.ANNOUNCEMENTS_AT_ONCE,
        exchange.ANNOUNCEMENTS_PER_S,
        exchange.SUSPICIONS_AT_ONCE,
        exchange.SUSPICIONS_PER_S,
        exchange.INVALID_AT_ONCE,
        exchange.INVALID_PER_S,
        exchange.TABLES_AT_ONCE,
        1 / exchange.TABLES_PER_S,
        exchange.HOME_TABLES_AT_ONCE,
        exchange.HOME_TABLES_PER_S,
        membership_wire.MAX_BATCH_BYTES // membership_wire.SMALLEST_BYTES,
        membership_wire.MAX_TABLE_BYTES // membership_wire.SMALLEST_BYTES,
        exchange.STATEMENTS_AT_ONCE,
    ),
    "addresses": (
        MAX_PEERS,
        MAX_ADDRESSES_PER_PEER,
        peer_record.MAX_RECORD_BYTES / KIB,
        MAX_REMEMBERED,
        MAX_UNREACHED,
        dialer.MAX_ATTEMPTS,
        dialer.MAX_RELAYED,
        ADDRESSES_OF_A_RELAY,
        dialer.MAX_NAMES,
        LOOKUPS,
        UNAWAITED_DIALS,
    ),
    "dial-backs (whether a node can be reached)": (
        reachability._AT_ONCE,
        reachability._AT_ONCE_PER_ADDRESS,
        reachability._BURST_PER_ADDRESS,
        reachability._BURST_S,
        reachability._SLOW_S,
        reachability.PEERS_ASKED,
        reachability.MAX_PEERS_TRIED,
        reachability._MAX_BODY_BYTES / KIB,
    ),
    "hole punching": (
        hole_punching.PUNCHES_AT_ONCE,
        hole_punching.ATTEMPTS,
        hole_punching.PUNCH_AGAIN_S,
        hole_punching._MAX_ADDRESSES,
        hole_punching.COMERS_AT_ONCE,
        hole_punching.COMERS_AGAIN_S,
    ),
    "relaying": (
        RELAY.reservations,
        RELAY.reservations_per_address,
        RELAY.circuits,
        RELAY.circuits_per_address,
        RELAY.circuits_to_peer,
        RELAY.circuits_to_peer_per_address,
        RELAY.circuit_bytes / MIB,
        RELAY.circuit_s / 60,
        RELAY.bytes_per_s / MIB,
        RELAY.requests_per_address,
        RELAY.requests_per_address_s,
        relay_client.PLACES,
        relay_client._FIRST_ASK_TIMEOUT_S,
        relay_client._ASK_TIMEOUT_S,
    ),
    "manifest, record, announcement, invite": (
        MAX_MANIFEST_BYTES / MIB,
        MAX_RECORD_BYTES / KIB,
        MAX_ANNOUNCEMENT_BYTES / KIB,
        MAX_INVITE_CHARS,
    ),
    "certificate, revocation list": (
        certificates.MAX_CERTIFICATE_BYTES / KIB,
        certificates.MAX_LIST_BYTES / KIB,
        certificates.MAX_DELEGATES_LISTS + 1,
        guard._MAX_CERTIFICATES,
        guard.LISTS_AT_ONCE,
    ),
    "limited invites": (
        invitations.MAX_INVITATIONS,
        invitations.MAX_USES,
        invitations.MAX_WAITING,
        admission.TOKENS_AT_ONCE,
        admission.TOKEN_EVERY_S,
    ),
    "parts of a model": (
        chunk_server.SLOTS_PER_PEER,
        chunk_server.SLOTS,
        chunk_server.MAX_WAITING,
        chunk_client.SLOWEST_BYTES_PER_S / 1000,
        chunk_client.CHUNK_S,
        chunk_client.LONGEST_S,
        chunk_client.TRIAL_S,
        chunk_schedule.SLOW_S,
        download.MAX_ELSEWHERE,
        download.MAX_AT_ONE,
        download.WINDOW,
        weights_wire.MAX_RUN,
    ),
    "swarms that a node in none lists": (
        nearby.MAX_SWARMS,
        nearby.MAX_SWARMS_TOLD,
        nearby.MAX_MEMBERS,
        nearby.MAX_ASKED,
    ),
    "log": (
        logs._FILES + 1,
        logs._FILE_BYTES / 10**6,
        rate_limit.BURST,
        1 / rate_limit.PER_S,
        active_swarm.PEER_EVENTS_AT_ONCE,
        1 / active_swarm.PEER_EVENTS_PER_S,
        event_log.KEPT_NOTES,
    ),
    "idle links": (ENOUGH_LINKS,),
    "training in rounds": (
        statements.MAX_MEMBERS,
        statements.MAX_MEMBERS_TOGETHER,
        record._MEMBERS_BEFORE,
        round_log.MAX_ENTRY_BYTES,
        (MAX_PAYLOAD_BYTES + 1) / KIB,
        statements.KEPT_STATEMENTS,
        statements.MAX_ATTEMPTS + 1,
        2 * island.RoundTiming().lead_s,
        grid.MOST_TOGETHER,
        island.MAX_PEERS,
        traces.MOST_TRACES,
        traces.TRACE_BYTES / MIB,
        island.RoundTiming().exchange_s,
        decisions.SLOWEST_BYTES_PER_S * 8 / 10**6,
        round_log.MEASURED_ROUNDS,
        checkpoint.HELD_S,
        checkpoint.HELD_CHANGES,
        (Settings().disk_floor or 0) / 10**9,
        train_jobs.KEPT_FINISHED_S,
        round_log.RECENT_ROUNDS,
        greetings.MOST_FIRST,
        greetings.MOST_WAITING,
        greetings.MOST_AWAY,
        greetings.STRANGERS,
        greetings.STRANGERS_ALONE,
        greetings.NAMED,
        greetings.MOST_NAMED,
        greetings.UNKNOWN_S / 60,
        greetings.UNKNOWN_MOST_S / 60,
        greetings.SILENT_S,
        greetings.SILENT_MOST_S / 60,
        train_jobs.KEPT_FINISHED_MOST_S,
    ),
    "texts of training jobs": (
        MAX_TOKENIZER_BYTES / MIB,
        reading.READ_S,
        reading.READ_BYTES_PER_S,
        reading.READ_AT_ONCE,
    ),
    "looking for training jobs": (
        job_search.ASKED_AT_ONCE,
        job_search.ASK_S,
        job_search.FIND_S,
        train_jobs.FIND_OTHER_S,
        job_text.HOLDERS_AGAIN_S,
        job_text.HOLDERS_AGAIN_MOST_S,
        train_jobs.ASKED_FOR_LIST,
        train_jobs.ASK_FOR_LIST_S,
        round_wire.MAX_JOBS,
        job_search.MOST_BYTES / KIB,
        job_search.KEPT_CHECKED,
    ),
    "machines for an island of several": (
        machines.ASKED_AT_ONCE,
        machines.SEARCH_S,
        machines.ASK_AGAIN_S,
        machines.ASK_AGAIN_MOST_S,
        machines.MOST_ROOMS,
    ),
    "fine-tuning at a hop": (
        training_hop.MAX_WAITING_BYTES / MIB,
        training_hop.MAX_KEPT_BYTES / 2**30,
        training_hop.KEPT_VERSIONS,
        training_hop.MAX_KEPT_STATES,
        training_hop.IDLE_STREAM_S,
        (Settings().train_disk or 0) / 2**30,
        activations.LEAST_BYTES / KIB,
        (Settings().disk_floor or 0) / 10**9,
        training_wire.FRAMES_AT_ONCE,
        training_wire.FRAMES_PER_S,
        training_wire.FRAME_JSON_BYTES,
        trainer.MAX_QUEUED_BYTES / MIB,
        outbound.FRAME_COST_BYTES,
        trainer.Patience().stuck_s,
        states.SLOWEST_BYTES_PER_S * 8 / 10**6,
    ),
    "connections to the API, and to the page of `shoal web`": (
        server.MAX_CONNECTIONS,
        server.IDLE_S,
        server.SEND_S,
    ),
    "WebSockets of `shoal web`": (server.MAX_MESSAGE_CHARS, server.MAX_FRAMES_PER_S),
    "requests to the API under way": (places.MAX_REQUESTS, places.OWN_REQUESTS),
    "peers from the local network (mDNS)": (
        seeker.MAX_NEIGHBOURS,
        seeker.NEIGHBOUR_DIALS,
        seeker.DIALS_AT_ONCE,
        mdns.KNOWN_PEERS,
        mdns.PEERS_AT_ONCE,
        1 / mdns.PEERS_PER_S,
        mdns.MAX_PACKET_BYTES,
        mdns_packets.MAX_RECORDS,
        mdns_packets.MAX_NAMES,
        mdns.PACKETS_AT_ONCE,
        mdns.PACKETS_PER_S,
        mdns.SOURCE_PACKETS,
        mdns.SOURCE_BYTES,
        mdns.MAX_SOURCES,
        mdns.READING_SHARE * 100,
        mdns.TEXTS_AT_ONCE,
    ),
    "routers (UPnP)": (
        sum(upnp.SEARCHES_S),
        upnp.MAX_DATAGRAM_BYTES / KIB,
        upnp.MAX_PAGES,
        upnp.MAX_PAGES_OF_DEVICE,
        upnp.FIND_S,
        upnp.ANSWER_S,
        upnp.MAX_ANSWER_BYTES / KIB,
        upnp.MAX_HEADER_BYTES / KIB,
        upnp.MAX_SERVICES,
    ),
    "bodies of requests to the API": (
        api_guard.MAX_BODY_BYTES / MIB,
        bodies.MAX_PARTS,
        bodies.LONG_BYTES / KIB,
        bodies.AT_ONCE,
    ),
    "a model's tokenizer": (
        tokenizer_growth.MOST_FILE_CHARS,
        tokenizer_growth.MOST_VALUES,
        tokenizer_growth.MOST_NAMES,
        tokenizer_growth.MOST_TOKENS,
        tokenizer_growth.MOST_VOCABULARY_CHARS,
        tokenizer_growth.MOST_TOKEN_CHARS,
        tokenizer_growth.MOST_SCORED_BYTES,
        tokenizer_growth.MOST_MERGES,
        tokenizer_growth.MOST_ADDED_CHARS,
        tokenizer_growth.MOST_CHANGED_CHARS,
        tokenizer_growth.MOST_RULE_CHARS,
        tokenizer_growth.MOST_MAP_CHARS,
        reply_service.REST_OF_LOADING,
    ),
    "texts of requests before their replies (chat template, tokenizer)": (
        text_places.NODE_OWNER_TEXTS,
        text_places.KEYS_TEXTS,
        text_places.TEXT_S,
        text_places.PLACE_S,
    ),
    "schemas and grammars of requests": (
        constraint.MAX_CHARS,
        constraint.TRUSTED_CHARS,
        grammar_trial.CPU_S,
        grammar_trial.MEMORY_BYTES / MIB,
        grammar_trial.AT_ONCE,
        text_places.TEXT_S,
    ),
    "tool calls of a reply": (tool_calls.MAX_CALLS, tool_calls.MOST_HEAD_CHARS, tool_calls.MOST_SPACE_CHARS),
    "responses kept for programs": (
        response_store.MOST,
        response_store.MOST_OWNER_BYTES / MIB,
        response_store.MOST_BYTES / MIB,
    ),
}


def limits_table() -> dict[str, str]:
    """The rows of the table of limits: what is limited, and how."""
    text = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text()
    assert ("waits for them for a quarter of a second at most" in text) == (download.ROOM_S == 0.25)
    part = text.split("### Limits", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return {what.strip(): limit for what, limit, *_ in rows[2:]}


def test_every_limit_is_that_of_the_code() -> None:
    table = limits_table()
    assert set(table) == set(ROWS)
    for what, numbers in ROWS.items():
        named = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", table[what])}
        assert set(map(float, numbers)) <= named, what


def test_limits_in_words_are_those_of_the_code() -> None:
    table = limits_table()
    assert ("three quarters of them inbound" in table["connections"]) == (DOORS.inbound_share == 0.75)
    assert ("a quarter of the places and of the cache" in table["sessions at a hop"]) == (PLACES.reserve == 0.25)
    assert ("A quarter of the room" in table["adapters at a hop"]) == (shares.RESERVE == 0.25)
    assert ("now and then 0.5 s" in table["waits of a step"]) == (batching.MAX_LONG_WAIT_S == 0.5)
    assert ("after a minute" in table["idle session streams"]) == (IDLE_STREAM_S == 60.0)
    assert places.MAX_REQUESTS < server.MAX_CONNECTIONS  # so that one without a request can always be closed
    assert ("for two minutes" in table["bodies and answers in memory"]) == (link.UNFINISHED_S == 120.0)
    text = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text()
    assert ("waits for them for a quarter of a second at most" in text) == (download.ROOM_S == 0.25)
    assert ("is looked up once a second" in table["`identify` and `ping` of other libp2p software"]) == (
        identify.KEPT_S == 1.0
    )
    assert f"a text has {chat_template._MAX_TEXT:,} characters at most" in text
    assert f"the template's code {chat_template.MAX_PYTHON_CHARS:,}" in text
    longest_without_certificate_s = guard.GRACE_S + 2 * guard.SWEEP_S  # until the first sweep, and for the last check
    assert ("connect for less than a minute at a time" in text) == (longest_without_certificate_s < 60.0)
    assert ("reply that is over for up to 15 minutes" in text) == (ServerSettings().rest_s == 900.0)
    assert ("held off for 10 s, doubled each time up to an hour" in text) == (
        (DOORS.first_holdoff_s, DOORS.longest_holdoff_s) == (10.0, 3600.0)
    )
