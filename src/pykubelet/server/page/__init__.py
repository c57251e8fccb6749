"""The page for operators: how the node is, and why a pod does not run.

`routes` serves server-rendered HTML on the port of `--page-port`; each view is a pure function from facts
(`facts`) to HTML (`html`, escaped by construction). `events` sends what has changed to connected clients from
one task, which runs only while there is a client. `history` keeps the charts. `agent/page.py` collects the
facts and starts the server; nothing here is imported while the port is off.
"""
