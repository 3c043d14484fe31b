-- The tables of sampled episodes.
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS samples (
    task INTEGER, member INTEGER, headers BLOB, payloads BLOB, PRIMARY KEY (task, member));
CREATE TABLE IF NOT EXISTS failures (kind TEXT PRIMARY KEY, count INTEGER, detail TEXT);
