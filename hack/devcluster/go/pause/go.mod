module millpond.dev/hack/devcluster/go/pause

go 1.26.0
