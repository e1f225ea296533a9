"""One self-contained HTML page about a job, made from the files of its folder."""
