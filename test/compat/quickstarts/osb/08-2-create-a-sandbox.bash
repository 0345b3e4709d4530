osb sandbox create --image python:3.12 --timeout 30m -o json
