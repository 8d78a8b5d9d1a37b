"""Forecasts a task on machines: its speed, time and cost, what limits it, and who should do it.

Pure functions over values: they read no file (but for `history`), know no peer, and load neither torch nor trio.
Callers read the machines from a file or from a running node. What fits into memory is computed by `engine.budget`, the
time of a token over a route by `app.routing.cost`; the formulas are not repeated here.

Units: seconds, bytes, flop (a multiplication and an addition are two), bytes/s, flop/s, watts.

    R   bytes/s at which a machine reads weights       P   weights of a block           n   rows (tokens) of a step
    C   flop/s of a machine; less for a few rows       w   bytes a weight               s   tokens of context
    f   floor: seconds of a block, however small       kv  bytes of a token's cache     q   width of the queries
    l   seconds of a link, one way                     B   bytes/s of a link            H   width of the hidden state

    block (`devices`)          t(n) = max((w P + sessions s kv) / R, n (2 P + 4 s q) / C, f); the head likewise
    token (`replies`)          sum of links + hop overhead and waiting + blocks t(1), then the way back and the head
    shared cores               machines of one host compute one after the other: where the slowest stage counts, the
                               stages of a host are one
    k replies at once          tokens/s = min(k / token, k / slowest stage's t(k))
    first token of p           sum of (t(c) + c H b / B) + (ceil(p / c) - 1) max(t(c), c H b / B) + links + head, in
                               chunks of c tokens
    stage (`training_step`)    T = passes 2 P n / C, with 2, 3, 3 or 4 passes (adapters or all weights, kept or
                               recomputed); the head 2 or 3, for the n whose loss counts; X = 2 n H b / B in either
                               direction, b bytes a number
    step of m micro-batches    sum of (T + X + 2 l) + (m - 1) max(T, X) + head + farthest 2 l to the head and back, and
                               3 x 2 l to agree; T has an m-th of the optimiser, 28 bytes a trained weight / R; idle
                               share = 1 - m sum T / (hosts step)
    averaging n copies         2 (n - 1) / n bytes / min(B up, B down) + 2 l
    round (`rounds`)           every x step x s(K, q) + max(0, exchange - hidden); s(K, q) is the expected q-th of K
                               arrivals over the mean one, for a log-normal spread
    utilisation                every x step / round
    lost work                  failures an hour x (half a snapshot interval + restoring), as a share of the time
    cost (`forecast`)          energy = sum of watts x seconds; renting = flop / (C x share of peak) x price of an hour;
                               sent bytes x price of a byte where they are billed
    doubling the machines      speeds up by (g + 1) / (g / 2 + 1), g = computing / communicating
"""
