package healthcheck

import (
	"net"
	"net/http"
	"sync"
)

// Everybody may connect to health checks, and each connection takes a descriptor of the process.
const (
	// maxConnections is how many connections a server has.
	maxConnections = 256
	// maxNodePortConnections is how many the servers of all health check node ports have together.
	maxNodePortConnections = 1024
)

// connections bounds how many connections servers have. For a new one too many, the one closes that
// has been idle for longest, or else the one whose request has taken longest: who only holds
// connections shuts out nobody, as a health check is answered at once.
type connections struct {
	most int

	mu       sync.Mutex // guards all below
	sequence uint64     // of the last change
	open     map[net.Conn]connection
}

// connection is busy while it has a request, since a change.
type connection struct {
	busy  bool
	since uint64
}

func newConnections(most int) *connections {
	return &connections{most: most, open: map[net.Conn]connection{}}
}

// changed is an http.Server.ConnState.
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	if one := c.record(conn, state); one != nil {
		_ = one.Close()
	}
}

// record returns the connection to close; nil for none.
func (c *connections) record(conn net.Conn, state http.ConnState) (tooMany net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.open[conn]; !known && state != http.StateNew { // it is being closed
		return nil
	}
	switch state {
	case http.StateClosed, http.StateHijacked:
		delete(c.open, conn)
		return nil
	case http.StateNew:
		if len(c.open) >= c.most {
			tooMany = c.oldest()
			delete(c.open, tooMany)
		}
	case http.StateActive, http.StateIdle:
	}
	c.sequence++
	c.open[conn] = connection{busy: state == http.StateActive, since: c.sequence}
	return tooMany
}

func (c *connections) oldest() (oldest net.Conn) {
	for conn, is := range c.open {
		if was := c.open[oldest]; oldest == nil || was.busy && !is.busy || was.busy == is.busy && is.since < was.since {
			oldest = conn
		}
	}
	return oldest
}
