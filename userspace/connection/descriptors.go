package connection

import (
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Descriptors are those of this process that the clients of service ports hold. IP
// families, and Providers, may share one limit, and then have the same figures.
type Descriptors struct {
	// Used is how many they have, and Limit how many they may have at the moment.
	Used, Limit int
	// Refused counts the clients that got none, and Ended those that gave way to
	// others, since the start.
	Refused, Ended int
	// ShortSince is since when clients are refused or ended; zero if none was in the last
	// minute.
	ShortSince time.Time
	// Most is the service port whose clients have the most descriptors, and MostUsed how
	// many.
	Most     changetracker.ServicePortName
	MostUsed int
}
