-- The tables of a ledger; schema.py has their checksums.

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
-- One row for each training group; seq is its position in the order of the dataset; leases = JSON
-- list of the active leases: (lease id, worker id, members, version).
CREATE TABLE groups (
  seq INTEGER PRIMARY KEY, group_id TEXT UNIQUE, task_id TEXT, row INTEGER, epoch INTEGER,
  state TEXT, reason TEXT, step INTEGER, place INTEGER, leases TEXT, sum INTEGER);
CREATE INDEX groups_by_step ON groups (step) WHERE step NOTNULL;
-- Header (msgpack, with the digest of the payload), and tree of turns as received; other columns repeat
-- the header for queries;
-- prompt = digest of the first turn's prompt; the payload is NULL after it was dropped; n numbers the
-- rows without gaps.
CREATE TABLE trajectories (
  n INTEGER PRIMARY KEY, trajectory_id TEXT UNIQUE, group_id TEXT, member INTEGER, seat TEXT,
  reward REAL, tokens INTEGER, trained_tokens INTEGER, oldest INTEGER, newest INTEGER,
  interruptions INTEGER, header BLOB, sum INTEGER, prompt BLOB, payload BLOB);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
-- The prompts of first turns, int32; the trajectories of a group share equal ones.
CREATE TABLE prompts (
  group_id TEXT, digest BLOB, tokens BLOB, PRIMARY KEY (group_id, digest)) WITHOUT ROWID;
CREATE TABLE failures (
  group_id TEXT, member INTEGER, lease_id TEXT, class TEXT, detail TEXT, sum INTEGER,
  PRIMARY KEY (group_id, member, lease_id)) WITHOUT ROWID;
-- Header and payload, as received, of unfinished episodes; deleted when the episode ends.
CREATE TABLE turns (
  group_id TEXT, member INTEGER, seat TEXT, idx INTEGER, header BLOB, payload BLOB,
  PRIMARY KEY (group_id, member, seat, idx)) WITHOUT ROWID;
-- One row for each step that the trainer reported; trained = JSON list of the trajectory ids that the
-- trainer used.
CREATE TABLE steps (
  step INTEGER PRIMARY KEY, trained TEXT, metrics TEXT, ranks INTEGER, fingerprint TEXT,
  sum INTEGER);
-- Without a join: SQLite would copy all payloads when a query joins the view.
CREATE VIEW payloads AS
  SELECT trajectory_id, payload AS turns, IFNULL(
    (SELECT tokens FROM prompts p WHERE p.group_id = t.group_id AND digest = prompt), X''
  ) AS prompt_tokens
  FROM trajectories t;
-- Published versions of the weights; proof = record of what was sent (PolicyProof.record), or NULL.
CREATE TABLE versions (version INTEGER PRIMARY KEY, proof TEXT);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT);
CREATE TABLE evals (eval_id INTEGER PRIMARY KEY, metrics TEXT);
-- Number of rows of each table, and the sum of their checksums modulo 2^62.
CREATE TABLE heads (name TEXT PRIMARY KEY, rows INTEGER, sum INTEGER) WITHOUT ROWID;
