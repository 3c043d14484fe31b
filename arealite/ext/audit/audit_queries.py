"""The SQL queries of an audit: the rows to count, and the rules that find a problem.

The tables are the views that the audit creates: they have only the records after the mark. A name
with `main.` is the whole table.
"""

from arealite.ext.audit.audit_report import IN_STATE

CLOSED = ("durable", "filtered")
"""Final states of groups; only a roll-back changes them."""
TRAINED = f"""
(SELECT g.step, t.* FROM trajectories t JOIN groups g USING (group_id)
 WHERE g.state IN {IN_STATE["trained"]})"""
REPORTED = """(SELECT step, value AS trajectory_id
 FROM steps, json_each(IIF(json_valid(trained), trained, '[]')))"""
UNUSABLE = "IFNULL(reason, '') LIKE 'unusable:%'"
CHECKS = {
    "lost": {
        "groups missing from the dataset's order": """
            SELECT 'g' || (before + 1) FROM
              (SELECT seq, LAG(seq, 1, :seq - 1) OVER (ORDER BY seq) AS before FROM groups
               WHERE seq >= :seq
               UNION ALL SELECT rows, (SELECT MAX(seq) FROM main.groups) FROM heads
               WHERE name = 'groups')
            WHERE seq > before + 1""",
        "trajectories missing after": """
            SELECT before FROM
              (SELECT n, LAG(n, 1, :row) OVER win AS last,
                 LAG(trajectory_id, 1, 'the beginning') OVER win AS before
               FROM trajectories WHERE n > :row WINDOW win AS (ORDER BY n)
               UNION ALL SELECT rows + 1, t.rowid, trajectory_id FROM heads, main.trajectories t
               WHERE name = 'trajectories'
               AND t.rowid = (SELECT MAX(rowid) FROM main.trajectories))
            WHERE n > last + 1""",
        "trajectories without a group": """
            SELECT trajectory_id FROM trajectories
            WHERE group_id NOT IN (SELECT group_id FROM groups)""",
        # a member has neither finished nor used all attempts
        "groups with missing members": """
            SELECT g.group_id FROM groups g
            WHERE g.state IN ('complete', 'batched', 'trained', 'durable') AND (
              SELECT COUNT(*) FROM (
                SELECT member FROM trajectories t WHERE t.group_id = g.group_id
                UNION SELECT member FROM failures f WHERE f.group_id = g.group_id AND :attempts
                GROUP BY member HAVING COUNT(*) >= :attempts)
              ) < (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'group_size')""",
        "steps with only a report or trained groups": f"""
            SELECT step + 1 FROM (
              SELECT step FROM steps
              UNION ALL SELECT DISTINCT step FROM groups WHERE state IN {IN_STATE["trained"]})
            GROUP BY step HAVING COUNT(*) = 1""",
        "unreported steps before a reported step": """
            SELECT DISTINCT step + 1 FROM groups
            WHERE state = 'batched' AND step < (SELECT MAX(step) FROM steps) ORDER BY step""",
    },
    "repeated": {
        "steps whose reported ids differ from the batch": f"""
            SELECT DISTINCT step + 1 FROM
              (SELECT * FROM {REPORTED} UNION ALL SELECT step, trajectory_id FROM {TRAINED})
            GROUP BY step, trajectory_id HAVING COUNT(*) != 2""",
        "trajectories stored twice": """
            SELECT group_id || '/' || member || '/' || seat FROM trajectories
            GROUP BY group_id, member, seat HAVING COUNT(*) > 1""",
    },
    "broken": {
        "trained trajectories with tokens older than max_staleness={max_staleness:g}": f"""
            SELECT trajectory_id FROM {TRAINED} WHERE step - oldest > :max_staleness""",
        "ended episodes with stored turns": """
            SELECT DISTINCT u.group_id || '/' || u.member FROM turns u LEFT JOIN groups g
            USING (group_id) LEFT JOIN trajectories t USING (group_id, member)
            WHERE t.member NOTNULL OR g.state IS NULL OR g.state NOT IN ('offered', 'leased')""",
    },
}
"""By field of the report: the text of a problem, and the query that finds it."""
ROWS = {
    "groups": f"""
        SELECT IFNULL(state, '') IN {CLOSED} AS is_final, IFNULL(state, '') AS label,
          sum AS row_sum, {{columns}}
        FROM groups""",
    "steps": """
        SELECT step < {durable} AS is_final, '' AS label, sum AS row_sum, {columns}
        FROM steps""",
    "failures": f"""
        SELECT IFNULL(state, '') IN {CLOSED} AS is_final, class AS label, f.sum AS row_sum,
          {{columns}}
        FROM failures f LEFT JOIN groups g USING (group_id)""",
    "trajectories": f"""
        SELECT IFNULL(state, '') IN {CLOSED} AS is_final, IFNULL(state, '') AS label,
          t.sum AS row_sum, {{columns}}, step, n, {UNUSABLE} AS is_unusable, prompt_tokens,
          turns
        FROM trajectories t LEFT JOIN groups g USING (group_id)
          LEFT JOIN payloads USING (trajectory_id)""",
}
"""By table: a query of its rows.

Columns: `is_final` (only a roll-back changes the row), `label` (the state of its group, or the
class of a failure), `row_sum` (the stored checksum), and the columns of the checksum."""
ENDS = """
SELECT IFNULL(MAX(rowid), 0), (SELECT IFNULL(MAX(step), 0) FROM checkpoints),
  (SELECT IFNULL(MAX(seq) + 1, 0) FROM main.groups)
FROM main.trajectories"""
"""Selects the last row of the trajectories, the newest checkpoint's step, and the next seq."""
