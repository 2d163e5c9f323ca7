package conntrack

import "errors"

// ErrUnanswered is what ReportConnections reports about a connection that no packet of the
// endpoint has answered, or only a reset.
var ErrUnanswered = errors.New("connection is not answered, or refused")
