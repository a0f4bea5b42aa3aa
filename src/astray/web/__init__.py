"""What the page shows: documents made of a comparison or of one run, a local server for them, and the one-file report.

`columns`, `overview` and `detail` make the documents, `views` puts them together for one comparison or run;
`server` hands them out while somebody looks, `onefile` puts them into a file. The page itself is built from `page/`
into `static/`. Nothing here is imported by anything but the command line and `Comparison.to_html`.
"""
