"""What the page shows: documents made of a comparison or of one run, a local server for them, and the one-file report.

views.py         a comparison or a run as the page needs it
columns.py       the tables that the page sorts and filters; which rows are of one call, and which call is in which
overview.py      the answer, with its evidence
detail.py        everything about one row
pair_values.py   histograms, heat maps and the worst elements of one pair
elements.py      the kept values of one tensor, block by block
wire.py          documents as JSON, columns as raw numbers
run_list.py      the runs that the page may open, and the session document
options.py       the options of a comparison that the page may set, checked
workspace.py     what is open, and the job under way
server.py        the local server
safety.py        token, host names, sizes and headers of requests; slow connections do not keep others out
html.py          the built page and the HTML around it: for the server, and for a comparison as one file

The page itself is built from `page/` into `static/`. Only the command line and `Comparison.to_html` import this.
"""
