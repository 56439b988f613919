"""Scripts in Lua for what must happen as a whole or not at all: commands of Redis 6.2, EVALSHA by redis-py.

Every script may be repeated after a lost answer: the second time it finds nothing left to do.
A write that Redis may refuse when it is full (XADD, SET) comes first where a refusal must change nothing.
"""

from buffer.interface import END
from buffer.redis_store.keys import (
    QUARANTINE_BYTES,
    QUARANTINE_LENGTH,
    QUARANTINE_RECORD_BYTES,
    QUARANTINE_START_BYTES,
    WORKERS_GROUP,
)

_ANEW = f"""
-- After an id at the end, which only a foreign hand gives, Redis finds no next one: the entries of the stream
-- then get new ids, in their order; 1 if it was so. With `partials` it is a stream of tickets: who has claimed
-- one loses it, as to another worker.
local function anew(stream, partials)
  local info = redis.pcall('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do info[info[i]] = info[i + 1] end
  if not string.find(info['last-generated-id'] or '', '^{END.partition("-")[0]}%-') then return 0 end
  local entries = redis.call('XRANGE', stream, '-', '+')
  redis.call('DEL', stream)
  if partials then redis.call('XGROUP', 'CREATE', stream, '{WORKERS_GROUP}', '0', 'MKSTREAM') end
  for _, entry in ipairs(entries) do
    if partials then redis.call('HDEL', partials, stream .. ':' .. entry[1]) end
    -- Lua unpacks 8,000 values at most; an entry of so many fields is a foreign hand's.
    local fields = #entry[2] <= 1000 and entry[2] or {{'record', ''}}
    redis.call('XADD', stream, '*', unpack(fields))
  end
  return 1
end
"""

ANEW = (
    _ANEW
    + """
-- KEYS stream of groups
return anew(KEYS[1])
"""
)

_SET_ASIDE = f"""
-- Moves an entry to the quarantine; 0 if it is gone already. The group is '' for a stream without one.
-- XDEL before XADD: once a script has written, a full Redis lets it finish.
local function set_aside(stream, quarantine, count, group, id, reason)
  local found = redis.call('XRANGE', stream, id, id)[1]
  if group ~= '' then redis.call('XACK', stream, group, id) end
  if not found then return 0 end
  local record = found[2][1] == 'record' and found[2][2] or ''
  local bytes = #record
  if bytes > {QUARANTINE_RECORD_BYTES} then record = string.sub(record, 1, {QUARANTINE_START_BYTES}) end
  redis.call('XDEL', stream, id)
  local kept = {{'XADD', quarantine, 'MAXLEN', {QUARANTINE_LENGTH}, '*', 'source', stream, 'id', id,
    'reason', reason, 'bytes', bytes, 'record', record}}
  if redis.pcall(unpack(kept)).err then
    -- no stream, or none with a next id: of a foreign hand
    redis.call('DEL', quarantine)
    redis.call(unpack(kept))
  end
  redis.call('INCR', count)
  local length = redis.call('XLEN', quarantine)
  while length > 1 and redis.call('MEMORY', 'USAGE', quarantine, 'SAMPLES', 0) > {QUARANTINE_BYTES} do
    length = length - 1
    redis.call('XTRIM', quarantine, 'MAXLEN', length)
  end
  return 1
end
"""

GUARD = """
-- Before a script by which a learner changes the run. KEYS owner, then the script's; ARGV token, run id and
-- place, then its own. Refuses a learner that another one has followed. '' is the token of a tool that is no
-- learner.
local owner, token = table.remove(KEYS, 1), table.remove(ARGV, 1)
local run_id, place = table.remove(ARGV, 1), table.remove(ARGV, 1)
if token ~= '' then
  local found = redis.call('HMGET', owner, 'token', 'run_id', 'place', 'record', 'until')
  local newest, fenced = tonumber(found[1] or '0'), false
  if newest > tonumber(token) then
    fenced = true
  elseif newest > 0 and newest < tonumber(token) then
    -- Redis has lost this learner's token. It was restored to an earlier state; or it was emptied, its clock
    -- stepped back, and another learner acquired the run: that one holds a lease.
    local same, time = found[2] == run_id and found[3] == place, redis.call('TIME')
    fenced = not same and tonumber(found[5] or '0') > time[1] * 1000 + math.floor(time[2] / 1000)
  end
  if fenced then return redis.error_reply('FENCED ' .. (found[4] or '')) end
  if newest < tonumber(token) then redis.call('HSET', owner, 'token', token) end
end
"""

_NOW_MS = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
"""

_EVEN_IF_FULL = """
-- A full Redis refuses a script's first write where that needs memory, and none once the script has written.
-- Only a learner makes room, so that one must be able to come back: this write needs no memory.
redis.call('HDEL', KEYS[1], '')
"""

ACQUIRE = (
    _NOW_MS
    + """
-- KEYS owner, run's info; ARGV run id, place, record, lease ms
-- Returns {token} to whoever may lead the run now, else {0, record of who does, the end of its lease}.
local found = redis.call('HMGET', KEYS[1], 'token', 'run_id', 'place', 'record', 'until')
local same = found[2] == ARGV[1] and found[3] == ARGV[2]
local over_ms = tonumber(found[5] or '0')
if over_ms > now_ms + ARGV[4] then
  -- No lease lasts so long: Redis's clock has stepped back. It ends as if it had been renewed now.
  over_ms = now_ms + ARGV[4]
  redis.call('HDEL', KEYS[1], '')
  redis.call('HSET', KEYS[1], 'until', string.format('%.0f', over_ms))
end
if not same and over_ms > now_ms then return {'0', found[4], string.format('%.0f', over_ms)} end
local token = string.format('%.0f', math.max(now_ms, tonumber(found[1] or '0') + 1))
"""
    + _EVEN_IF_FULL
    + """
redis.call('HSET', KEYS[1], 'token', token, 'run_id', ARGV[1], 'place', ARGV[2], 'record', ARGV[3],
  'starves', '', 'until', string.format('%.0f', now_ms + ARGV[4]))
redis.call('HDEL', KEYS[2], 'finished')
return {token}
"""
)

RENEW_LEASE = (
    _NOW_MS
    + _EVEN_IF_FULL
    + """
-- KEYS owner, run's info; ARGV run id, place, record, lease ms (0 gives the run free), then field, value… of
-- the info. Writes the info again if Redis lost it; returns whether it did.
redis.call('HSET', KEYS[1], 'run_id', ARGV[1], 'place', ARGV[2], 'record', ARGV[3],
  'until', string.format('%.0f', now_ms + ARGV[4]))
if #ARGV == 4 or redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('HSET', KEYS[2], unpack(ARGV, 5))
return 1
"""
)

PUBLISH = (
    _EVEN_IF_FULL
    + """
-- KEYS run's info; ARGV field, value…
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
"""
)

CREATE_GROUPS = """
-- KEYS ticket streams; ARGV consumer group. XDEL, of an id that no entry has, since Redis may be full.
redis.call('XDEL', KEYS[1], '0-0')
for _, key in ipairs(KEYS) do
  local reply = redis.pcall('XGROUP', 'CREATE', key, ARGV[1], '0', 'MKSTREAM')
  if reply.err and not string.find(reply.err, 'BUSYGROUP') then return reply end
end
return 1
"""

TRIM = """
-- KEYS stream; ARGV the last id that goes. There may be none after it.
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
return redis.call('XDEL', KEYS[1], ARGV[1])
"""

REMOVE = """
-- KEYS stream; ARGV entry ids
return redis.call('XDEL', KEYS[1], unpack(ARGV))
"""

FORGET = """
-- KEYS all that is to go. Lua unpacks 8,000 values at most.
for i = 1, #KEYS, 1000 do
  redis.call('DEL', unpack(KEYS, i, math.min(i + 999, #KEYS)))
end
return 1
"""

ADMIT = (
    _ANEW
    + """
-- KEYS ticket stream, partials, admission, cursor (or none); ARGV admission's name, cursor, records…
if redis.call('GET', KEYS[3]) == ARGV[1] then return 0 end
redis.call('SET', KEYS[3], ARGV[1])
if KEYS[4] then redis.call('SET', KEYS[4], ARGV[2]) end
anew(KEYS[1], KEYS[2])
for i = 3, #ARGV do redis.call('XADD', KEYS[1], '*', 'record', ARGV[i]) end
return 1
"""
)

READMIT = (
    _ANEW
    + """
-- KEYS ticket stream, partials; ARGV group, then of each ticket its entry id and its new record, '' to drop it
-- Exchanges tickets that are still open, claimed or not, for new ones at the end of the stream, which nobody
-- owns: their holders lose them, as to another worker. What was committed meanwhile is passed over. Returns
-- how many were exchanged; none where the ids have just become others.
if anew(KEYS[1], KEYS[2]) == 1 then return 0 end
local exchanged = 0
for i = 2, #ARGV, 2 do
  local id, record = ARGV[i], ARGV[i + 1]
  if redis.call('XDEL', KEYS[1], id) == 1 then
    redis.call('XACK', KEYS[1], ARGV[1], id)
    redis.call('HDEL', KEYS[2], KEYS[1] .. ':' .. id)
    if record ~= '' then redis.call('XADD', KEYS[1], '*', 'record', record) end
    exchanged = exchanged + 1
  end
end
return exchanged
"""
)

CLAIM = (
    _SET_ASIDE
    + """
-- KEYS ticket streams, the most urgent first, partials, quarantine, its count
-- ARGV group, consumer, count, idle ms of an abandoned ticket, deliveries that a ticket may have
-- Returns {number of the stream, entry id, record, partial or ''}: abandoned tickets before new ones, as
-- they are older.
-- A ticket over which too many workers fell silent goes to the quarantine. A consumer's own tickets, renewed
-- too late, come back to it without counting as a delivery: it has not fallen silent, it asks.
local group, consumer, left, idle, limit = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local partials, quarantine, count = KEYS[#KEYS - 2], KEYS[#KEYS - 1], KEYS[#KEYS]
local out = {}
local function deliveries_of_own(key)
  local found = {}
  local pending = redis.call('XPENDING', key, group, 'IDLE', idle, '-', '+', left, consumer)
  for _, own in ipairs(pending) do found[own[1]] = own[4] end
  return found
end
local function add(stream, entries, again, own)
  for _, entry in ipairs(entries) do
    if entry and entry[2] then
      local key, id, fields = KEYS[stream], entry[1], entry[2]
      local deliveries = again and redis.call('XPENDING', key, group, id, id, 1)[1][4] or 1
      if again and own[id] then
        deliveries = math.min(own[id], limit)
        redis.call('XCLAIM', key, group, consumer, 0, id, 'RETRYCOUNT', deliveries, 'JUSTID')
      end
      if deliveries > limit then
        set_aside(key, quarantine, count, group, id, limit .. ' workers fell silent over it')
        redis.call('HDEL', partials, key .. ':' .. id)
      else
        local partial = again and redis.call('HGET', partials, key .. ':' .. id) or ''
        out[#out + 1] = {stream, id, fields[1] == 'record' and fields[2] or '', partial}
        left = left - 1
      end
    end
  end
end
for stream = 1, #KEYS - 3 do
  local key, cursor = KEYS[stream], '0-0'
  repeat
    if left <= 0 then return out end
    local own = deliveries_of_own(key)
    local reply = redis.call('XAUTOCLAIM', key, group, consumer, idle, cursor, 'COUNT', left)
    cursor = reply[1]
    add(stream, reply[2], true, own)
  until cursor == '0-0'
  if left <= 0 then return out end
  local new = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', left, 'STREAMS', key, '>')
  if new then add(stream, new[1][2], false) end
end
return out
"""
)

COMMIT = """
-- KEYS ticket stream, group stream, partials; ARGV group, consumer, entry id, run id or '', run's info, record
-- 1 if the ticket was still this consumer's, else 0 and nothing happens. A group of another run's is refused.
-- The info is only read, by whoever may not write it, and so is no key of the script.
local id = ARGV[3]
local run_id = ARGV[4] ~= '' and redis.call('HGET', ARGV[5], 'run_id')
if run_id and run_id ~= ARGV[4] then return redis.error_reply('FOREIGN ' .. run_id) end
if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[2], '*', 'record', ARGV[6])
redis.call('XACK', KEYS[1], ARGV[1], id)
redis.call('XDEL', KEYS[1], id)
redis.call('HDEL', KEYS[3], KEYS[1] .. ':' .. id)
return 1
"""

RENEW = """
-- KEYS ticket stream; ARGV group, consumer, entry ids…
-- Sets the idle time of those still this consumer's to 0; returns the others. Lua unpacks 8,000 values at most.
local mine, kept, lost = {}, {}, {}
for _, pending in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1000000, ARGV[2])) do
  mine[pending[1]] = true
end
for i = 3, #ARGV do
  local ids = mine[ARGV[i]] and kept or lost
  ids[#ids + 1] = ARGV[i]
end
for i = 1, #kept, 1000 do
  local ids = {unpack(kept, i, math.min(i + 999, #kept))}
  ids[#ids + 1] = 'JUSTID'
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(ids))
end
return lost
"""

HEARTBEAT = """
-- KEYS worker's heartbeat, workers; ARGV group, consumer, heartbeat, seconds until it expires, worker
-- A full Redis takes it, too, since the learner sees by the heartbeats that workers wait for room: PERSIST is a
-- write that needs no memory, and once a script has written, Redis lets it finish.
redis.call('PERSIST', KEYS[1])
redis.call('SET', KEYS[1], ARGV[3], 'EX', ARGV[4])
redis.call('SADD', KEYS[2], ARGV[5])
return 1
"""

RELEASE = """
-- KEYS ticket stream, partials; ARGV group, consumer, consumer of released tickets, idle ms to give them,
-- then of each ticket its entry id, and what has been drawn of it or ''
-- Hands back those still this consumer's, so that anybody can claim them at once; returns how many.
-- Their delivery to this consumer is not counted: it has not failed on them. A full Redis takes no partial.
local released = 0
for i = 5, #ARGV, 2 do
  local id, partial = ARGV[i], ARGV[i + 1]
  local mine = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2])[1]
  if mine then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, id, 'IDLE', ARGV[4],
      'RETRYCOUNT', math.max(0, mine[4] - 1), 'JUSTID')
    local field = KEYS[1] .. ':' .. id
    redis.call('HDEL', KEYS[2], field)
    if partial ~= '' then redis.pcall('HSET', KEYS[2], field, partial) end
    released = released + 1
  end
end
return released
"""

QUARANTINE = (
    _SET_ASIDE
    + """
-- KEYS source stream, quarantine, its count; ARGV entry id, reason, group or ''
return set_aside(KEYS[1], KEYS[2], KEYS[3], ARGV[3], ARGV[1], ARGV[2])
"""
)

REQUEUE = """
-- KEYS quarantine, stream that the entry came from; ARGV entry id in the quarantine
-- Puts a record back at the end of its stream; 0 if it is not there any more, or came from another stream.
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not found then return 0 end
local fields = {}
for i = 1, #found[2], 2 do fields[found[2][i]] = found[2][i + 1] end
if fields.source ~= KEYS[2] then return 0 end
redis.call('XADD', KEYS[2], '*', 'record', fields.record)
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
"""

SWEEP = """
-- KEYS ticket stream; ARGV group, idle ms. Removes consumers that own nothing and were silent so long.
-- Before that, claims of idle time 0 are renewed. Most of them have just been; but one from before Redis's
-- clock stepped back is at 0, too, and would not run out until the clock is where it was.
for _, claim in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1000000)) do
  if claim[3] == 0 then redis.call('XCLAIM', KEYS[1], ARGV[1], claim[2], 0, claim[1], 'JUSTID') end
end
local removed = 0
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for i = 1, #flat, 2 do consumer[flat[i]] = flat[i + 1] end
  if consumer.pending == 0 and consumer.idle >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
    removed = removed + 1
  end
end
return removed
"""
