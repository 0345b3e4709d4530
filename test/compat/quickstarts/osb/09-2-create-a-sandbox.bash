osb config set defaults.image python:3.12
osb config set defaults.timeout 30m
osb sandbox create -o json
