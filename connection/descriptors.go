package connection

import (
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Descriptors counts the descriptors of this process that the clients of service ports
// hold. IP families, and Providers, that share a budget have the same figures.
type Descriptors struct {
	// Used is how many descriptors clients hold, and Limit how many they may hold now.
	Used, Limit int
	// Refused counts the clients that got no descriptor, and Ended those that were ended
	// in favor of others, since the start.
	Refused, Ended int
	// ShortSince is when the current shortage began: since then, clients were refused or
	// ended. It is zero if none was in the last minute.
	ShortSince time.Time
	// Most is the service port whose clients hold the most descriptors, and MostUsed
	// their number.
	Most     changetracker.ServicePortName
	MostUsed int
}
