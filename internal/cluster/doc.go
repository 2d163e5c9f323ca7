// Package cluster tests many nodes at once, on a fake clock: each node runs the real change
// tracker, driver and runner over a kernel that is a map, and all of them watch one model of
// an API server, whose watch caches lag, stall, forget and serve old states. A seed decides
// everything, so that it replays a run:
//
//	go test ./internal/cluster -run TestSeeds -seed 7
package cluster
