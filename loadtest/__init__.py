"""Black-box load tests over HTTP; they import nothing from streamkv, so any server will do."""
