"""The process of one rank: joins the process group, runs requests, and reports to its supervisor."""
