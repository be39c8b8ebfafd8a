BEGIN TRANSACTION;
CREATE TABLE evaluation_leases (
	number INTEGER NOT NULL,
	worker VARCHAR(128) NOT NULL,
	versions JSON NOT NULL,
	granted_s DOUBLE NOT NULL,
	deadline_s DOUBLE NOT NULL,
	PRIMARY KEY (number),
	FOREIGN KEY(worker) REFERENCES workers (id)
);
INSERT INTO "evaluation_leases" VALUES(1,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','{"0": 0, "1": 0}',1.0,60.0);
CREATE TABLE evaluations (
	number INTEGER NOT NULL,
	lease BIGINT NOT NULL,
	split VARCHAR(32) NOT NULL,
	scores JSON NOT NULL,
	combine JSON NOT NULL,
	at_s DOUBLE NOT NULL,
	PRIMARY KEY (number),
	UNIQUE (lease, split),
	FOREIGN KEY(lease) REFERENCES evaluation_leases (number)
);
CREATE TABLE events (
	number INTEGER NOT NULL,
	at_s DOUBLE NOT NULL,
	kind VARCHAR(64) NOT NULL,
	text TEXT NOT NULL,
	data JSON NOT NULL,
	PRIMARY KEY (number)
);
INSERT INTO "events" VALUES(1,100.0,'joined','Witty Badger 54, cpu','{"worker": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}');
INSERT INTO "events" VALUES(2,100.0,'joined','Amber Robin b1, cpu','{"worker": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}');
INSERT INTO "events" VALUES(3,100.0,'joined','Glad Otter b4, cpu','{"worker": "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee"}');
CREATE TABLE leases (
	id VARCHAR(200) NOT NULL,
	phase INTEGER NOT NULL,
	round INTEGER NOT NULL,
	shard INTEGER NOT NULL,
	worker VARCHAR(128) NOT NULL,
	step_start BIGINT NOT NULL,
	steps BIGINT NOT NULL,
	granted_s DOUBLE NOT NULL,
	due_s DOUBLE NOT NULL,
	deadline_s DOUBLE NOT NULL,
	state VARCHAR(16) NOT NULL,
	PRIMARY KEY (id),
	FOREIGN KEY(phase, round) REFERENCES rounds (phase, number),
	UNIQUE (phase, round, worker),
	CHECK (state IN ('open', 'reported', 'expired', 'released')),
	FOREIGN KEY(worker) REFERENCES workers (id)
);
INSERT INTO "leases" VALUES('0-0-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',0,0,0,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',0,10,101.0,105.0,161.0,'reported');
INSERT INTO "leases" VALUES('0-0-bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',0,0,1,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',0,10,101.0,105.0,161.0,'open');
CREATE TABLE phases (
	phase INTEGER NOT NULL,
	step BIGINT NOT NULL,
	finished BOOLEAN NOT NULL,
	PRIMARY KEY (phase)
);
INSERT INTO "phases" VALUES(0,0,0);
CREATE TABLE rounds (
	phase INTEGER NOT NULL,
	number INTEGER NOT NULL,
	base JSON NOT NULL,
	step_start BIGINT NOT NULL,
	steps BIGINT NOT NULL,
	opened_s DOUBLE NOT NULL,
	limit_s DOUBLE NOT NULL,
	deadline_s DOUBLE NOT NULL,
	extensions INTEGER NOT NULL,
	closed_s DOUBLE,
	reason TEXT NOT NULL,
	mark VARCHAR(32) NOT NULL,
	PRIMARY KEY (phase, number),
	FOREIGN KEY(phase) REFERENCES phases (phase)
);
INSERT INTO "rounds" VALUES(0,0,'{"0": 0, "1": 0}',0,10,100.0,60.0,161.0,0,NULL,'open','c45a75af9f9112d5');
CREATE TABLE run (
	id INTEGER NOT NULL CHECK (id = 1),
	spec TEXT NOT NULL,
	spec_sha256 VARCHAR(64) NOT NULL,
	corpus_sha256 VARCHAR(64) NOT NULL,
	corpus JSON NOT NULL,
	protocol INTEGER NOT NULL,
	paused BOOLEAN NOT NULL,
	created_s DOUBLE NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "run" VALUES(1,'name = ''r''','5555555555555555555555555555555555555555555555555555555555555555','cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc','{"train": "dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd"}',1,0,1.0);
CREATE TABLE tokens (
	number INTEGER NOT NULL,
	name TEXT NOT NULL,
	role VARCHAR(16) NOT NULL CHECK (role IN ('admin', 'worker', 'viewer')),
	sha256 VARCHAR(64) NOT NULL,
	created_s DOUBLE NOT NULL,
	revoked_s DOUBLE,
	PRIMARY KEY (number),
	UNIQUE (sha256)
);
INSERT INTO "tokens" VALUES(1,'worker','worker','ff3d8ce282219c2b8a3bc9df7247ee2911d4d02babf9ebc807ffd3bb285c18bd',1.0,NULL);
CREATE TABLE updates (
	number INTEGER NOT NULL,
	id VARCHAR(64) NOT NULL,
	lease VARCHAR(200) NOT NULL,
	worker VARCHAR(128) NOT NULL,
	phase INTEGER NOT NULL,
	base JSON NOT NULL,
	tokens BIGINT NOT NULL,
	steps BIGINT NOT NULL,
	codec VARCHAR(32) NOT NULL,
	num_bytes BIGINT NOT NULL,
	norm DOUBLE NOT NULL,
	lag INTEGER NOT NULL,
	weight DOUBLE NOT NULL,
	loss DOUBLE NOT NULL,
	received_s DOUBLE NOT NULL,
	refused TEXT,
	signature VARCHAR(256) NOT NULL,
	merged_phase INTEGER,
	merged_round INTEGER,
	PRIMARY KEY (number),
	FOREIGN KEY(merged_phase, merged_round) REFERENCES rounds (phase, number),
	CHECK (refused IS NULL OR merged_round IS NULL),
	UNIQUE (id),
	FOREIGN KEY(lease) REFERENCES leases (id),
	FOREIGN KEY(worker) REFERENCES workers (id),
	FOREIGN KEY(phase) REFERENCES phases (phase)
);
INSERT INTO "updates" VALUES(1,'08fa64a34c7863b65083a501af5a2cba6589f366b547d6dafca91f6efa3b016d','0-0-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',0,'{"0": 0, "1": 0}',5000000000,10,'int8',3000000000,0.5,0,1.0,2.25,110.0,NULL,'00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000',NULL,NULL);
CREATE TABLE versions (
	block INTEGER NOT NULL,
	version INTEGER NOT NULL,
	sha256 VARCHAR(64) NOT NULL,
	momentum_sha256 VARCHAR(64),
	difference_sha256 VARCHAR(64),
	phase INTEGER,
	round INTEGER,
	parent INTEGER,
	created_s DOUBLE NOT NULL,
	PRIMARY KEY (block, version),
	CHECK ((version = 0 AND parent IS NULL) OR (version > 0 AND parent = version - 1)),
	FOREIGN KEY(phase, round) REFERENCES rounds (phase, number),
	FOREIGN KEY(block, parent) REFERENCES versions (block, version)
);
INSERT INTO "versions" VALUES(0,0,'d487cecf0e51c94e690cbacc93db29c01e5e69a64fcc663218e5ab1ad8286dad',NULL,NULL,NULL,NULL,NULL,99.0);
INSERT INTO "versions" VALUES(1,0,'8f3614af7c00e44ecfaa85c42cd7d742933f3aa21631d5f2cc36f17f7f6fa623',NULL,NULL,NULL,NULL,NULL,99.0);
CREATE TABLE workers (
	id VARCHAR(128) NOT NULL,
	name TEXT NOT NULL,
	device TEXT NOT NULL,
	memory_bytes BIGINT NOT NULL,
	steps_per_s DOUBLE NOT NULL,
	nonce BIGINT NOT NULL,
	first_seen_s DOUBLE NOT NULL,
	last_seen_s DOUBLE NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "workers" VALUES('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','a','cpu',1000000000000,2.5,1,100.0,100.0);
INSERT INTO "workers" VALUES('bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','b','cpu',1000000000000,2.5,1,100.0,100.0);
INSERT INTO "workers" VALUES('eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee','e','cpu',1000000000000,2.5,1,100.0,100.0);
CREATE UNIQUE INDEX one_token_a_name ON tokens (name) WHERE revoked_s IS NULL;
CREATE UNIQUE INDEX one_open_round_a_phase ON rounds (phase) WHERE closed_s IS NULL;
CREATE UNIQUE INDEX one_update_a_lease ON updates (lease) WHERE refused IS NULL;
CREATE INDEX updates_by_worker ON updates (worker);
CREATE INDEX updates_by_phase ON updates (phase, merged_round);
COMMIT;
