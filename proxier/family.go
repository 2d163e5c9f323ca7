package proxier

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// family drives the engine of one IP family. The fields above mu are owned by the goroutine
// that syncs the family; there is never more than one.
type family struct {
	name      v1.IPFamily
	config    *Config
	log       *zap.Logger
	tracker   *changetracker.Tracker
	engine    Engine
	can       Abilities
	conntrack *Conntrack // nil: none
	health    Health
	trigger   func() // requests a sync

	resolver      desired.Resolver
	globals       desired.Globals
	updater       *desired.Updater
	part          changetracker.Part // of an Update that is not full
	full          bool               // the next Update must be full: at start, and after a failure
	lastFull      time.Time
	moduleWaits   int // how often waitForModule may still wait
	denied        map[changetracker.ServicePortName]*desired.Service
	flows         *flowTracker
	ending        *endTracker // nil: none
	traffic       bool        // the conntrack counts it
	noLocal       noLocal
	announcements *announcements
	counting      *sharedReading
	lock          lock
	drained       time.Time // the lock's queue
	foreignLock   string    // the last foreignLockError that was logged
	loggedFailure string    // of the last sync, if it failed as a whole
	broken        retry     // syncs that failed as a whole
	late          retry     // what follows programming
	cleaned       time.Time // the end of the last search for flows that succeeded, which took cleaning
	cleaning      time.Duration
	unclean       atomic.Bool // the search for flows is left for the next part
	cleanNow      atomic.Bool // a call of Sync waits for that search

	lookups lookups // of anybody

	mu          sync.Mutex // guards all below
	recorded    FamilyStatus
	ports       ports
	programmed  programmed
	leaving     leaving
	conflicts   []changetracker.Problem
	staleFlows  Condition
	unannounced Condition
	inUse       Condition
	lag         lag
	repairs     repairs
	watcher     watchState
	incomplete  bool // the last sync failed, or what follows programming, or that is left for the next one
}

func (f *family) locked(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// programmed is the input of the last successful Apply.
type programmed struct {
	state    *changetracker.State
	resolver desired.Resolver
	globals  desired.Globals
	resolved *desired.Resolved // the state, as resolver and globals decide
	traits   func(*desired.Service) desired.Traits
}
