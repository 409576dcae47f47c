"""One rank's process: joins the group, takes requests, reports to its supervisor."""
