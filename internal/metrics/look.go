package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Look is the present state of the host. It is read at every scrape, so every value
// must be in memory, or in a file of /proc.
type Look struct {
	Sandboxes     map[Kind]int   // how many there are of each kind
	Deleting      int            // deleted sandboxes of which something is left on the host
	Prepared      map[string]int // prepared slots by runtime
	Pools         []Pool         // of ready sandboxes
	Creating      int            // sandboxes that are being brought up
	Waiting       int            // sandboxes that wait for their turn
	PoolBytes     int64          // size of the storage pool
	PoolUsedBytes int64
	Flows         []Flows
	// What all sandboxes received and sent since the daemon started.
	RxBytes, TxBytes, RxPackets, TxPackets uint64
	// Packets in the queue of new flows, as the kernel counts them.
	QueueWaiting    int64 // now
	QueueOverflowed int64 // dropped because the queue was full
	QueueLost       int64 // dropped because the daemon did not read fast enough

	NamesAnswered, NamesUnanswered int64 // queries for which name servers were asked
	Ends                           []End
	Pressure                       map[string]int  // the rung of each disk, by its name
	Lasting                        map[string]bool // whether the host is in a state that an operator has to end, by its name
	Backup                         Backup
}

// End is the next end of a certificate or of a key.
type End struct {
	What, File   string // a key of the configuration and the path that it names; or a kind, and none
	Left, Notice time.Duration
}

// Backup is how the backups on a timer go.
type Backup struct {
	Every  time.Duration // 0: there is no timer
	Good   time.Time     // the last that succeeded; zero: none
	Bytes  int64         // of that
	Failed uint64        // since the daemon started
	Full   bool          // the last one failed because the target is full

	DrillGood  time.Time // the last restore drill that succeeded; zero: none
	DrillFails bool      // the last one failed

	DataBytes, DataSent int64 // of the last that succeeded: of data, and what of it was sent
	DataLeft            int   // volumes and snapshots that could not be read for it
	CheckFails          bool  // packs are missing or bad
	Unknown             int   // backups under the name of this host that another state has written
}

// Pool is a pool of ready sandboxes.
type Pool struct {
	Name             string
	Ready, Allocated int
	Work             map[string]PoolWork // by result
}

// PoolWork is how often something happened, and how long it took in all.
type PoolWork struct {
	N       uint64
	Seconds float64
}

// Kind is a state and a runtime.
type Kind struct{ State, Runtime string }

// Flows counts new flows with the same verdict and the same kind of reason.
type Flows struct {
	Verdict string // "allow", "deny" or "drop"
	Cause   string
	Count   uint64
}

// looker turns a Look into metrics.
type looker struct {
	look func() (Look, error)

	members, poolWork, poolSeconds, left, notice, pressure, lasting *prometheus.Desc

	backupEvery, backupGood, backupBytes, backupFailed, drillGood, drillFails, dataBytes, dataSent, dataLeft, backupUnknown,
	checkFails, backupFull *prometheus.Desc

	sandboxes, deleting, prepared, creations, pool, poolUsed, flows, bytes, packets, waiting, dropped, names, failed *prometheus.Desc
}

func newLooker(look func() (Look, error)) *looker {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("sandboxd_"+name, help, labels, nil)
	}
	return &looker{
		look:      look,
		sandboxes: d("sandboxes", "Sandboxes by state, ended ones too.", "state", "runtime"),
		deleting:  d("deleting_sandboxes", "Deleted sandboxes that the kernel is still taking apart."),
		prepared:  d("prepared_slots", "Slots that wait for a create, with all that needs neither image nor request.", "runtime"),
		members:   d("pool_members", "Sandboxes of a pool: ready ones that nobody took yet, and allocated ones.", "pool", "state"),
		poolWork: d("pool_results_total", "What a pool did: hit, miss, refused and lost creations, made and dropped members.", "pool",
			"result"),
		poolSeconds: d("pool_seconds_total", "How long that took: made members, and creations until their sandboxes ran.", "pool",
			"result"),
		left: d("validity_left_seconds", "Time until the next end of a certificate, an API key or an authority of a sandbox.", "what",
			"file"),
		pressure: d("disk_pressure_rung", "How far a disk has filled: 1 what would go anyway is removed, 2 nothing new is made, 3 idle "+
			"sandboxes are paused, 4 it takes no writes.", "space"),
		lasting:     d("lasting_state", "1 while the host is in a state that lasts until an operator ends it.", "state"),
		notice:      d("validity_notice_seconds", "How long before that end something should be done.", "what", "file"),
		backupEvery: d("backup_interval_seconds", "How often a backup is taken; 0 without a timer."),
		backupGood: d("backup_last_success_timestamp_seconds",
			"When the last backup began that was stored and read back, in Unix seconds; 0 if there was none."),
		backupBytes:  d("backup_bytes", "Size of the last backup that was stored and read back."),
		backupFailed: d("backup_failures_total", "Backups that failed."),
		drillGood: d("backup_drill_last_success_timestamp_seconds",
			"When the last restore drill began that succeeded, in Unix seconds; 0 if there was none."),
		drillFails: d("backup_drill_failed", "1 if the last restore drill failed."),
		dataBytes:  d("backup_data_bytes", "Size of the volumes, snapshots and layers in the last backup that was stored."),
		dataSent:   d("backup_data_sent_bytes", "Bytes of data that the last backup sent."),
		dataLeft:   d("backup_data_left_out", "Volumes and snapshots that could not be read for the last backup."),
		backupUnknown: d("backup_unknown",
			"Backups on the target under the name of this host that another state has written; they are not counted."),
		backupFull: d("backup_target_full",
			"1 if the last backup failed because the target is full, also after what may go was removed."),
		checkFails: d("backup_check_failed", "1 if the last comparison of packs with their checksums found a bad one."),

		creations: d("creations", "Creations in progress, and creations that wait for their turn.", "stage"),
		pool:      d("pool_size_bytes", "Size of the storage pool."),
		poolUsed:  d("pool_used_bytes", "Used bytes of the storage pool."),
		flows:     d("egress_flows_total", "New flows of sandboxes by verdict and kind of reason.", "verdict", "cause"),
		bytes:     d("network_bytes_total", "Bytes that sandboxes received (in) and sent (out).", "direction"),
		packets:   d("network_packets_total", "Packets that sandboxes received (in) and sent (out).", "direction"),
		waiting:   d("egress_queue_packets", "First packets of flows that wait for a verdict."),
		names:     d("egress_name_queries_total", "Queries for names for which a name server was asked.", "outcome"),
		dropped:   d("egress_queue_dropped_total", "First packets that were dropped: the queue was full, or its reader too slow.", "at"),
		failed:    d("look_failed", "1 if the state of the host could not be read; its metrics are missing then."),
	}
}

// Describe implements prometheus.Collector.
func (l *looker) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		l.members, l.poolWork, l.poolSeconds, l.left, l.notice, l.pressure, l.lasting,
		l.backupUnknown, l.backupEvery, l.backupGood, l.backupBytes, l.backupFailed, l.drillGood, l.drillFails, l.dataBytes,
		l.dataSent, l.dataLeft, l.checkFails, l.backupFull,
		l.sandboxes, l.deleting, l.prepared, l.creations, l.pool, l.poolUsed, l.flows, l.bytes, l.packets, l.waiting, l.dropped, l.names,
		l.failed,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (l *looker) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	v, err := l.look()
	if err != nil {
		gauge(l.failed, 1)
		return
	}
	gauge(l.failed, 0)
	for k, n := range v.Sandboxes {
		gauge(l.sandboxes, float64(n), k.State, k.Runtime)
	}
	gauge(l.deleting, float64(v.Deleting))
	for runtime, n := range v.Prepared {
		gauge(l.prepared, float64(n), runtime)
	}
	for _, p := range v.Pools {
		gauge(l.members, float64(p.Ready), p.Name, "ready")
		gauge(l.members, float64(p.Allocated), p.Name, "allocated")
		for result, w := range p.Work {
			count(l.poolWork, float64(w.N), p.Name, result)
			if w.Seconds > 0 {
				count(l.poolSeconds, w.Seconds, p.Name, result)
			}
		}
	}
	for _, e := range v.Ends {
		gauge(l.left, e.Left.Seconds(), e.What, e.File)
		gauge(l.notice, e.Notice.Seconds(), e.What, e.File)
	}
	for space, rung := range v.Pressure {
		gauge(l.pressure, float64(rung), space)
	}
	for state, is := range v.Lasting {
		n := 0.0
		if is {
			n = 1
		}
		gauge(l.lasting, n, state)
	}
	gauge(l.creations, float64(v.Creating), "going")
	gauge(l.creations, float64(v.Waiting), "waiting")
	gauge(l.pool, float64(v.PoolBytes))
	gauge(l.poolUsed, float64(v.PoolUsedBytes))
	for _, f := range v.Flows {
		count(l.flows, float64(f.Count), f.Verdict, f.Cause)
	}
	count(l.bytes, float64(v.RxBytes), "in")
	count(l.bytes, float64(v.TxBytes), "out")
	count(l.packets, float64(v.RxPackets), "in")
	count(l.packets, float64(v.TxPackets), "out")
	gauge(l.waiting, float64(v.QueueWaiting))
	count(l.dropped, float64(v.QueueOverflowed), "queue")
	count(l.dropped, float64(v.QueueLost), "socket")
	count(l.names, float64(v.NamesAnswered), "answered")
	count(l.names, float64(v.NamesUnanswered), "unanswered")
	gauge(l.backupEvery, v.Backup.Every.Seconds())
	gauge(l.backupGood, unix(v.Backup.Good))
	gauge(l.drillGood, unix(v.Backup.DrillGood))
	for what, is := range map[*prometheus.Desc]bool{
		l.drillFails: v.Backup.DrillFails, l.checkFails: v.Backup.CheckFails, l.backupFull: v.Backup.Full,
	} {
		value := 0.0
		if is {
			value = 1
		}
		gauge(what, value)
	}
	gauge(l.backupUnknown, float64(v.Backup.Unknown))
	gauge(l.dataBytes, float64(v.Backup.DataBytes))
	gauge(l.dataSent, float64(v.Backup.DataSent))
	gauge(l.dataLeft, float64(v.Backup.DataLeft))
	gauge(l.backupBytes, float64(v.Backup.Bytes))
	count(l.backupFailed, float64(v.Backup.Failed))
}

// unix is a time as Prometheus has it; 0: never.
func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.Unix())
}
