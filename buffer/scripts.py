"""What must happen as a whole or not at all, in Lua. Commands of Redis 6.2 only; EVALSHA through redis-py.

Every script may be repeated after a lost answer: the second time it finds nothing left to do.
A write that Redis may refuse when it is full (XADD, SET) comes first where a refusal must change nothing.
"""

from buffer.keys import QUARANTINE_LENGTH, QUARANTINE_RECORD_BYTES

ADMIT = """
-- KEYS ticket stream, admission, cursor (or none); ARGV admission's name, cursor, records…
if redis.call('GET', KEYS[2]) == ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
if KEYS[3] then redis.call('SET', KEYS[3], ARGV[2]) end
for i = 3, #ARGV do redis.call('XADD', KEYS[1], '*', 'record', ARGV[i]) end
return 1
"""

CLAIM = """
-- KEYS ticket streams, the most urgent first; ARGV group, consumer, count, idle ms of an abandoned ticket
-- Returns {number of the stream, entry id, record}: abandoned tickets before new ones, as they are older.
local group, consumer, left, idle = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local out = {}
local function add(stream, entries)
  for _, entry in ipairs(entries) do
    if entry and entry[2] then
      local fields = entry[2]
      out[#out + 1] = {stream, entry[1], fields[1] == 'record' and fields[2] or ''}
      left = left - 1
    end
  end
end
for stream, key in ipairs(KEYS) do
  local cursor = '0-0'
  repeat
    if left <= 0 then return out end
    local reply = redis.call('XAUTOCLAIM', key, group, consumer, idle, cursor, 'COUNT', left)
    cursor = reply[1]
    add(stream, reply[2])
  until cursor == '0-0'
  if left <= 0 then return out end
  local new = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', left, 'STREAMS', key, '>')
  if new then add(stream, new[1][2]) end
end
return out
"""

COMMIT = """
-- KEYS ticket stream, group stream; ARGV group, consumer, entry id, record
-- 1 if the ticket was still this consumer's, else 0 and nothing happens.
local id = ARGV[3]
if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[2], '*', 'record', ARGV[4])
redis.call('XACK', KEYS[1], ARGV[1], id)
redis.call('XDEL', KEYS[1], id)
return 1
"""

RENEW = """
-- KEYS ticket stream; ARGV group, consumer, entry ids…
-- Sets the idle time of those still this consumer's to 0; returns the others.
local lost = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2]) == 0 then
    lost[#lost + 1] = id
  else
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'JUSTID')
  end
end
return lost
"""

RELEASE = """
-- KEYS ticket stream; ARGV group, consumer, consumer of released tickets, idle ms to give them, entry ids…
-- Hands back those still this consumer's, so that anybody can claim them at once; returns how many.
local released = 0
for i = 5, #ARGV do
  local id = ARGV[i]
  if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, id, 'IDLE', ARGV[4], 'JUSTID')
    released = released + 1
  end
end
return released
"""

QUARANTINE = """
-- KEYS source stream, quarantine stream; ARGV entry id, reason, start of the record, length, group or ''
-- XDEL first: once a script has written, a full Redis lets it finish.
if ARGV[5] ~= '' then redis.call('XACK', KEYS[1], ARGV[5], ARGV[1]) end
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[4], '*',
  'source', KEYS[1], 'id', ARGV[1], 'reason', ARGV[2], 'record', ARGV[3])
return 1
"""

SWEEP = """
-- KEYS ticket stream; ARGV group, idle ms. Removes consumers that own nothing and were silent so long.
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


def quarantine_args(entry: str | bytes, reason: Exception, record: bytes, group: str) -> list:
    """ARGV of QUARANTINE; `group` is the consumer group, or empty for a stream without one."""
    start = record[:QUARANTINE_RECORD_BYTES]
    return [entry, str(reason), start, QUARANTINE_LENGTH, group]
